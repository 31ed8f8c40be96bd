// What the persistent decode kernel is told: a list of phases in device memory, each one step of a layer that every block
// takes part in. Blocks hand what a phase makes on to the next as packets (Place): no barrier of the grid lies between.
#pragma once
#include <cstdint>

#include "../context.h"

namespace pk::persist {

constexpr int kWarps = 8;                       // that multiply, a ring of weights each
constexpr int kConsumers = 32 * kWarps;
constexpr int kProducers = 4;                   // warps that fill the rings, each of kWarps / kProducers of them
constexpr int kWriters = 4;                     // warps that add up what the multiplying ones left, and hand it on
constexpr int kThreads = kConsumers + 32 * (kProducers + kWriters);
constexpr int kConsumerRegisters = 184, kOtherRegisters = 72;
constexpr int kMaxRows = 8;
constexpr int kMinSlots = 4, kMaxSlots = 12;  // of a ring: a delta head's state comes in four

enum PhaseKind : int32_t { kMatmul = 0, kAttend = 1, kPublish = 2, kDelta = 3 };

// How an output goes to whoever stages it, if not as packets of its own numbers (fold.cuh): as the codes of integer products, or four neighbours at a time.
enum Fold : int32_t { kUnfolded = 0, kInCodes = 1, kInFours = 2 };

// How x lies in shared memory: what the inner product of a weight format wants.
enum Staging : int32_t { kStageBf16 = 0, kStageFp8 = 1, kStageNibbles = 2, kStageBytes = 3 };

// Elements of K that a warp takes from the ring at once, and how many bytes of the ring they use.
__host__ __device__ constexpr int chunk_elements(int32_t format) { return format == PK_FP8_E4M3 ? 512 : 256; }
// Row-major formats: a box of 8 rows of 512 bytes, then 16 bytes of scales.
constexpr int kBoxRows = 8, kBoxWidth = 512, kBoxBytes = kBoxRows * kBoxWidth;
__host__ __device__ constexpr int block_chunk_bytes(int32_t format) { return format == PK_Q8_0 ? 2 * 2176 : format == PK_Q4_K ? 2368 : 3360; }
__host__ __device__ constexpr bool is_rows(int32_t format) { return format == PK_BF16 || format == PK_FP8_E4M3; }
// Where slots are Q4_K's a chunk of Q6_K is sent as two parts: as much as fits in a slot of its own, the rest in the next one, where that of the tile that is
// multiplied at the same time is, too.
constexpr int kFirstBytes = 2368, kRestBytes = 992;
__host__ __device__ constexpr bool is_parted(int32_t format, int slot_bytes) { return format == PK_Q6_K && slot_bytes < kFirstBytes + kRestBytes; }
__host__ __device__ constexpr int slot_bytes(int32_t format) {
    return format == PK_BF16 ? kBoxBytes : format == PK_FP8_E4M3 ? kBoxBytes + 128 : block_chunk_bytes(format);
}
// Rows of a tile, as a power of two.
__host__ __device__ constexpr int tile_shift(int32_t format) { return is_rows(format) ? 3 : 4; }

struct Weight {
    const uint8_t *data;
    const float *row_scale, *block_scale, *bias;
    int64_t row_bytes;
    int32_t rows, first_tile, n_tiles, first_column;
    int32_t scale_stride, format;
    float scale;
    int32_t n_chunks;  // along K
    int32_t each, more;  // tiles of a block where weights have blocks of their own; so many blocks have one more
};

// An operand. What one phase writes and a later one reads goes from block to block as packets: eight bytes with four of data
// (an F32 or two BF16) and the number of the phase that wrote them, so that no reader needs another sign of arrival. What was there before the launch is published as packets by its first phase.
struct Place {
    uint64_t data;   // 0: packets only
    int64_t stride;  // elements, of packets too
    int32_t format;
    int32_t source;  // the phase whose packets these are
    uint64_t packets;
};

struct Attend {
    const float *q_norm, *k_norm, *frequency, *sinks, *gains, *out_gains;  // or null; gains: where heads of q, k and v are placed, and of outputs (FP8)
    int64_t k_offset, v_offset;
    int32_t n_heads, n_kv_heads, head_width, rope_width, rope_layout, window, is_fp8;
    float magnitude, eps, scale, softcap;
    int32_t is_half;  // pages in F16
};

// A gated delta net's step of heads of 128 x 128 with four taps (delta.cuh). Beside the raw q, k, v and z it reads b and a.
struct Delta {
    const float *conv, *a_log, *dt_bias, *scale;
    int64_t state_offset, tail_offset;
    int32_t n_k_heads, n_v_heads, is_tiled, is_sigmoid;
    float eps;
};

struct alignas(16) Phase {
    int32_t kind, n_w, is_gated, n_tiles;  // tiles of one side when gated
    int32_t shift;                         // which block begins
    int32_t each, more;                    // tiles of a block; so many blocks have one more
    int32_t k, staging;
    int32_t tile_shift;                    // rows of a tile, as a power of two
    int64_t rows_symbol;
    int32_t is_gathered, act;              // x: the last token of the row that is sampled
    float scale, softcap, eps, inverse_k;
    Place x, y, add, normed;               // add: or what else is read; normed: where the normed rows go, or absent; attention: x is the raw q, k, v, add what gates the outputs
    const float *norm;                     // weights of the norm before the product, or null
    // x, or y, folded (fold.cuh), or 0; the norm that folded y is for, or null. Tiles of such y go to blocks by twos (is_paired).
    uint64_t folded_x, folded_y;
    const float *folded_norm;
    int32_t fold_x, fold_y;
    int32_t is_paired, folded_staging;     // folded_staging: of whoever reads folded y
    int32_t begins[2];                     // where each weight has blocks of its own, the first of the second and of the third; else 0
    int32_t is_plain;                      // x of a norm lies in memory since before the launch
    int32_t cut;                           // blocks have halves (1) of tiles or quarters (2) of pairs of tiles: of the first one the end of K, whose sums the block before adds to its own
    union {
        Weight w[3];
        Attend attend;
        Delta delta;
    };
};

struct Arguments {
    const Phase *phases;
    const CUtensorMap *boxes;  // three a phase, for weights of row-major formats; or null
    int32_t n_phases, n_slots, slot_bytes, x_bytes, part_bytes;
    int32_t most_sent;  // chunks that a ring may have under way, less than slots; 0: as many as fit
    int32_t most_ahead; // the same of what is not multiplied with yet
    int32_t paired;     // groups of 16 positions of a head up to which two blocks of a cluster share it; 0: blocks have no clusters
    const StepInfo *info;
    const int32_t *sample_at;
    const int32_t *row_slot, *row_position, *row_flags, *token_page, *page_table;
    uint8_t *kv, *recurrent;
    int64_t page_stride, recurrent_stride;
    int32_t page_tokens, slot_pages;
    uint8_t *partial;   // packets of attention's ranges: [items][8 heads][width] sums, then [8][2] largest logits and sums of weights
    uint8_t *ends;      // packets of sums of cut tiles' ends of K: [kBuffers][blocks][sides][rows of two tiles]
    uint32_t *epochs;   // [0]: phases of all launches before this one; [1]: blocks that have ended
};

// Shared memory of attention: q, what warps know of heads, the new token's logits, k and v, then a scratch of sums: [warps][heads at once][head_floats].
__host__ __device__ constexpr int head_bytes(int width) { return 2 * width + 64; }
__host__ __device__ constexpr int heads_once(int width) { return 2 * kConsumers / width; }
// Runs of 32 elements lie 36 floats apart, heads 4 more: those that write and those that read at once reach all banks.
__host__ __device__ constexpr int head_floats(int width) { return width / 32 * 36 + 4; }
__host__ __device__ constexpr int facts_at(int width) { return 8 * head_bytes(width); }
__host__ __device__ constexpr int logits_at(int width) { return facts_at(width) + 8 * kWarps * 8; }
__host__ __device__ constexpr int new_at(int width) { return logits_at(width) + 8 * 4; }
__host__ __device__ constexpr int scratch_at(int width) { return new_at(width) + 2 * 2 * width; }
__host__ __device__ constexpr int attend_bytes(int width) { return scratch_at(width) + kWarps * heads_once(width) * head_floats(width) * 4; }

// A delta head: rows of its state that a warp holds, and that a slot of the ring brings; shared memory of its step.
constexpr int kDeltaWidth = 128, kDeltaRows = kDeltaWidth / kWarps, kPieceRows = 4, kPieceBytes = 4 * kPieceRows * kDeltaWidth, kDeltaBytes = 12 * 1024;

// In how many slots of the ring 16 positions of K lie, or of V.
__host__ __device__ constexpr int group_pieces(int slot_bytes, int width) { return slot_bytes >= 32 * width ? 1 : 2; }

// Of two slots the second one's positions lie so far into it that lanes which read both reach all banks.
__host__ __device__ constexpr int piece_shift(int slot_bytes, int width) { return slot_bytes >= 16 * width + 64 ? 64 : 0; }

// What two blocks that share a head send each other: of four heads' elements pairs, then the heads' largest logits and sums of weights.
constexpr int kPairedWidth = 128, kPairedFacts = 4 * kPairedWidth / 2, kPairedNumbers = kPairedFacts + 4;

// What a phase may ask about a row of the step.
struct RowFacts {
    int32_t position, slot, page, is_dead;
};

constexpr int kBuffers = 8;    // of packets
constexpr int kEndSideBytes = 32 * 8, kEndBytes = 2 * kEndSideBytes;
constexpr int kStaticBytes = 3840;  // at most, of shared memory beside what is divided (Layout)
constexpr int kPhases = 4;     // descriptions that multiplying and writing warps share: three phases ahead of the writers
constexpr int kSquaresAt = 0;  // of a buffer of sums: sums of squares, a float a warp
constexpr int kSumsAt = 32;    // [warps][tiles][rows of a tile]
constexpr int kTilesOnce = 4;                // tiles of 16 rows that are added up at once: what sums do not take is the rings'
constexpr int kWarpSums = kTilesOnce * 16;  // floats of a warp

// A record of 32 folded elements.
constexpr int kFoldedPackets = 7, kFoldedBytes = 16 * kFoldedPackets;
// Where what holds element `at` of folded outputs begins.
__host__ __device__ inline int64_t folded_at(int32_t fold, int64_t at) { return fold == kInFours ? at / 4 * 16 : at / 32 * kFoldedBytes; }

// Offsets in dynamic shared memory.
struct Layout {
    int32_t ring, x, part, phases, end;
};
__host__ __device__ inline Layout layout_of(const Arguments &a) {
    Layout l;
    l.ring = 0;
    l.x = kWarps * a.n_slots * a.slot_bytes;
    l.part = l.x + a.x_bytes;
    l.phases = l.part + 2 * a.part_bytes;
    l.end = l.phases + (kProducers + kPhases) * static_cast<int32_t>((sizeof(Phase) + 127) / 128 * 128);
    return l;
}

// x in shared memory: k elements and, where the last chunk is not whole, zeros behind them.
__host__ __device__ inline int32_t staged_elements(int32_t staging, int32_t k) { return staging == kStageFp8 ? (k + 511) / 512 * 512 : (k + 255) / 256 * 256; }
__host__ __device__ inline int32_t x_row_bytes(int32_t staging, int32_t k) { return 2 * staged_elements(staging, k); }
__host__ __device__ inline int32_t staged_bytes(int32_t staging, int32_t k) {
    return x_row_bytes(staging, k) + (staging == kStageBf16 ? 0 : staging == kStageFp8 ? staged_elements(staging, k) / 256 * 4 : k / 32 * 16);
}

// What a kernel of its own is for: everything that has no other; keys and values in F16; or products of some formats alone, with attention of heads of 128 and pages in BF16, whose
// code lies together: most of it runs once a phase and costs what it takes to fetch it.
enum Sort : int32_t { kEverything, kHalfPages, kNibbles, kBytes, kRowMajor };
__host__ __device__ constexpr bool is_lean(Sort sort) { return sort >= kNibbles; }
__host__ __device__ constexpr bool takes(Sort sort, int32_t format) {
    return !is_lean(sort) || (sort == kNibbles ? format == PK_Q4_K || format == PK_Q6_K : sort == kBytes ? format == PK_Q8_0 : is_rows(format));
}

template <int kRows, Sort kSort>
int32_t launch_rows(const Launch &l, const Arguments &a, int n_blocks);
// Whether all blocks can be there at once as clusters of two, on the multiprocessors of a stream; null: of the device.
template <Sort kSort>
bool fits_pairs(const Arguments &a, int n_blocks, cudaStream_t stream);

}  // namespace pk::persist
