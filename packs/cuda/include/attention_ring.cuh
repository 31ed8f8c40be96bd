// What the warps of the decode kernel (decode.cu) do by themselves: a ring of K and V that a warp fills and reads alone.
//
// Groups of positions come by one tensor copy a page and operand on Hopper where pages allow it, else by cp.async; bytes land
// as they are stored, FP8 becomes f16 in registers (F32 is narrowed before the store).
#pragma once
#include "attention_share.cuh"
#include "once.cuh"

#if defined(PK_WGMMA)
#include "wgmma_attention.cuh"
#endif

namespace pk {
namespace ring {

constexpr int kThreads = 128, kWarps = 4;

enum Kind { kBf16, kF16, kFp8, kF32 };
template <int kKind>
constexpr bool kHalfMath = kKind == kF16 || kKind == kFp8;
template <int kKind>
constexpr int kShift = kKind == kFp8 ? 0 : 1;  // log2 of the bytes of an element in shared memory
template <int kD, int kKind>
constexpr int kPanels = ((kD << kShift<kKind>) + 127) / 128;
// Positions that a warp takes at a time: more of narrow rows, so that as many bytes come with a step's instructions.
template <int kD, int kKind>
constexpr int kGroup = kPanels<kD, kKind> == 1 ? 32 : 16;
template <int kD, int kKind>
constexpr int kOperandBytes = kGroup<kD, kKind> * kPanels<kD, kKind> * 128;
// Bytes of a warp's ring: two blocks fill a Hopper multiprocessor (one block of wide heads); elsewhere 99 KB must hold a block.
#if defined(PK_WGMMA)
template <int kD>
constexpr int kRingBytes = kD <= 128 ? 24576 : 49152;
#else
template <int kD>
constexpr int kRingBytes = 16384;
#endif
template <int kD, int kKind>
constexpr int kRingStages = kRingBytes<kD> / (2 * kOperandBytes<kD, kKind>) < 8 ? kRingBytes<kD> / (2 * kOperandBytes<kD, kKind>) : 8;
template <int kD, int kKind>
constexpr int kWarpBytes = kRingStages<kD, kKind> * 2 * kOperandBytes<kD, kKind>;

// Rows that the warps join at a time, and bytes of a warp's part of the join.
template <int kD>
constexpr int kMergeRows = kD <= 128 ? 4 : 2;
template <int kD>
constexpr int kMergeBytes = kMergeRows<kD> * kD * 4;

// The tile's q lies in shared memory: read into registers once a segment, or (wide heads) for every group. Then the next
// segment's q needs a buffer of its own.
template <int kD>
constexpr bool kHoldQ = kD <= 128;
template <int kD>
constexpr int kQPieces = (kD + 63) / 64 * 8;
template <int kD>
constexpr int kQBytes = 16 * kQPieces<kD> * 16;
template <int kD>
constexpr int kQBuffers = kHoldQ<kD> ? 1 : 2;

struct Maps {
    CUtensorMap k, v;
};

// n / d, rounded down, of n up to 2^20: the exact division takes four times the instructions.
__device__ __forceinline__ int quotient(int n, int d) { return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d))); }

// Offset of a 16-byte piece: blocks of 8 rows x 128 bytes, swizzled as tensor copies leave them.
template <int kPanelsHere>
__device__ __forceinline__ uint32_t block_offset(int row, int piece) {
    return (row >> 3) * (kPanelsHere * 1024) + (piece >> 3) * 1024 + (row & 7) * 128 + (((piece ^ row) & 7) << 4);
}

// ---- barriers that sm_80 has too ----

__device__ __forceinline__ void ring_init(uint64_t *b, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)); }
__device__ __forceinline__ void ring_arrive(uint64_t *b) { asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}\n" ::"r"(shared_address(b)) : "memory"); }
__device__ __forceinline__ void ring_arrive_copies(uint64_t *b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory"); }
__device__ __forceinline__ bool ring_ready(uint64_t *b, uint32_t parity) {
    uint32_t ready;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(ready) : "r"(shared_address(b)), "r"(parity) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(ready) : "r"(shared_address(b)), "r"(parity) : "memory");
#endif
    return ready;
}

// ---- the work list ----

// A block's part of one (row, head, tile).
struct Segment {
    const int32_t *pages;
    int start, n_pairs, position, head, pair;  // the row, and the tile's first pair
    int first, end;                            // positions the row sees
    int group, n_groups;                       // first group of positions, and how many
    int block_first, block_last;               // blocks that share the (row, head, tile)
    bool is_first;                             // begins in this block
    ShareRow share;
};

// Warps of a block that take one segment together: all, two or one of them. A team of few holds as many rows of q as it has quarters.
struct Team {
    int shift, number, warp, thread;  // log2 of its warps; which of the block's; of the caller: its warp and thread in the team
    __device__ __forceinline__ explicit Team(int s) : shift(s), number(threadIdx.x >> (5 + s)), warp((threadIdx.x >> 5) & ((1 << s) - 1)), thread(threadIdx.x & ((32 << s) - 1)) {}
    __device__ __forceinline__ int rows() const { return 4 << shift; }
    __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, %1;" ::"r"(number + (shift == 2 ? 0 : 1)), "r"(32 << shift) : "memory"); }
};

// ---- numbers ----

template <bool kHalf>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
    if constexpr (kHalf) {
        const __half2 v = __floats2half2_rn(x, y);
        return *reinterpret_cast<const uint32_t *>(&v);
    } else {
        return pack_bf16(x, y);
    }
}
template <bool kHalf>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kHalf)
        mma_f16(d, a[0], a[1], a[2], a[3], b0, b1);
    else
        mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
}
// Two e4m3 of the low or high half of a word as f16.
__device__ __forceinline__ uint32_t halves(uint32_t word, int high) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(high ? word >> 16 : word & 0xffff), __NV_E4M3);
    return *reinterpret_cast<const uint32_t *>(&h);
}

__device__ __forceinline__ uint32_t load_q_halves(const AttentionArguments &a, int64_t at) { return pack2<true>(load_as_f32(a.q, at, a.q_format), load_as_f32(a.q, at + 1, a.q_format)); }

// Columns of an operand's fragment: FP8 takes four neighbours of a k step, and even and odd columns of O, as they lie in a word.
template <int kKind>
__device__ __forceinline__ int q_column(int k, int e) {
    const int j = threadIdx.x & 3;
    return kKind == kFp8 ? 16 * k + 4 * j + 2 * e : 16 * k + 2 * j + 8 * e;
}
template <int kKind>
__device__ __forceinline__ int o_column(int d, int e) {
    const int j = threadIdx.x & 3;
    return kKind == kFp8 ? (d >> 1) * 16 + 4 * j + 2 * e + (d & 1) : d * 8 + 2 * j + e;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// As copy_page, to leave the second-level cache first.
__device__ __forceinline__ void copy_page_once(uint32_t shared, const void *map, int group, int page, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %3, %4, %5}], [%2], %6;" ::"r"(shared), "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(group), "r"(page), "l"(kReadOnce) : "memory");
}
#endif

// A team asks for a tile's q (its rows, pieces of a row permuted by the row), F16 beside keys of F16, else BF16; `full` counts every thread of it once.
template <int kD, int kKind>
__device__ __forceinline__ void ask_q(const AttentionArguments &a, const Segment &s, const Team &team, uint8_t *to, uint64_t *full) {
    const int group = a.n_heads / a.n_kv_heads;
    const bool wide = a.q_format == (kKind == kF16 ? PK_F16 : PK_BF16) && a.q_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.q) % 16 == 0;
#pragma unroll 1  // what runs once a launch comes from L2 instruction by instruction
    for (int j = 0; j < 16 * kQPieces<kD> / kThreads; ++j) {
        const int i = (j << (5 + team.shift)) + team.thread, row = i / kQPieces<kD>, piece = i % kQPieces<kD>, pair = s.pair + row, token = pair / group;
        const bool ok = pair < s.n_pairs && piece * 8 < a.head_width;
        const int64_t from = ok ? static_cast<int64_t>(s.start + token) * a.q_stride + (s.head * group + pair - token * group) * a.head_width + piece * 8 : 0;
        uint8_t *at = to + row * kQPieces<kD> * 16 + ((piece ^ (row & 7)) << 4);
        if (wide) {
            copy16_async(shared_address(at), static_cast<const bf16 *>(a.q) + from, ok);
        } else {
#pragma unroll 1
            for (int e = 0; e < 4; ++e) reinterpret_cast<uint32_t *>(at)[e] = !ok ? 0 : kKind == kF16 ? load_q_halves(a, from + 2 * e) : load_q_pair(a, from + 2 * e);
        }
    }
    if (wide)
        ring_arrive_copies(full);
    else
        ring_arrive(full);
}

// The fragment of a k step.
template <int kD, int kKind>
__device__ __forceinline__ void read_q(uint32_t (&q)[4], const uint8_t *from, int rows, int k) {
    const int row = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = q_column<kKind>(k, e);
            uint32_t v;  // volatile: else the compiler keeps all of a wide head's q in registers that it does not have
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(from) + ((row + 8 * h) & (rows - 1)) * kQPieces<kD> * 16 + (((column >> 3) ^ (row & (rows - 1))) << 4) + (column & 7) * 2));
            if constexpr (kKind == kFp8) v = pack2<true>(low_f32(v), high_f32(v));
            q[h + 2 * e] = v;
        }
}

// kOnce: nobody else reads what it reads.
template <int kD, int kKind, bool kTensor, bool kOnce = false>
struct Warp {
    static constexpr int kStages = kRingStages<kD, kKind>, kP = kPanels<kD, kKind>, kBytes = kOperandBytes<kD, kKind>, kSize = kGroup<kD, kKind>;
    const AttentionArguments &a;
    const Maps &maps;
    uint8_t *ring;
    uint64_t *full;
    int lane;
    Team team;
    int mine = 0, both = 0;                         // groups of this warp in the current segment, and with those of the next one once that is known
    int issued = 0, looked = 0, put = 0, take = 0;  // groups asked for, and those whose pages are known, from the start of the current segment; ring positions
    int page = 0, page_after = 0;                   // of the groups `issued` and after it, as far as looked up; of tensor copies the boxes of [known, looked), one a lane, and as many after them
    int known = 0, asks_at = 0, asks_row = 0;       // tensor copies: position of the next group, row of its head in a page
    uint32_t take_turn = 0;

    __device__ __forceinline__ int n_mine(const Segment &s) const { return (s.n_groups - team.warp + (1 << team.shift) - 1) >> team.shift; }
    __device__ __forceinline__ int first_of(const Segment &s, int n) const { return (s.group + (n << team.shift) + team.warp) * kSize; }

    // Groups that the ring takes of what earlier steps wrote: those may be asked for before the kernels in front have ended.
    __device__ __forceinline__ int n_old(const Segment &s) const {
        int n = 0;
        for (const int most = min(kStages, mine); n < most && first_of(s, n) + kSize <= s.position; ++n) {}
        return n;
    }

    __device__ __forceinline__ int look_page(const int32_t *pages, int first, int low, int high) const { return pages[page_of(a, min(max(first + (lane & (kSize - 1)), low), high - 1))]; }

    // Pages of the boxes (16 positions) of this warp's groups from the n-th on, one a lane.
    static constexpr int kBoxes = kSize / 16, kKnown = 32 / kBoxes;
    __device__ __forceinline__ int look_boxes(const Segment &s, int n) const { return s.pages[page_of(a, min(max(first_of(s, n + lane / kBoxes) + lane % kBoxes * 16, s.first), s.end - 1))]; }

    // The first segment is known.
    __device__ __forceinline__ void begin(const Segment &s, int planned_page) {
        mine = both = n_mine(s);
        if constexpr (kTensor) {
            page = planned_page >= 0 ? planned_page : look_boxes(s, 0);
            looked = min(kKnown, mine);
            if (looked < mine) page_after = look_boxes(s, looked);
            turn_to(s);
        }
    }
    // The next segment is known.
    __device__ __forceinline__ void see(const Segment &next) {
        both = mine + n_mine(next);
        if constexpr (kTensor) {
            if (looked == mine) page_after = look_boxes(next, 0);
            if (issued == mine) turn_to(next);
        }
    }
    // The next segment is the current one.
    __device__ __forceinline__ void pass() {
        issued -= mine;
        looked -= mine;
        known -= mine;
        mine = both -= mine;
    }
    __device__ __forceinline__ void turn_to(const Segment &s) {
        asks_at = first_of(s, 0);
        asks_row = s.head * a.page_tokens;
    }

    // Asks for the group of positions that begins at `first`, of a row that sees [low, high); `page` holds the page of the lane's position.
    __device__ __forceinline__ void fetch(int first, int head, int low, int high) {
        uint8_t *to = ring + put * 2 * kBytes;
        {
            constexpr int kPer = 16 >> kShift<kKind>, kPieces = kD / kPer, kLoads = kSize * kPieces / 32;  // elements of a piece
            const int p = min(max(first + (lane & (kSize - 1)), low), high - 1);
            const int64_t page_at = static_cast<int64_t>(page) * a.page_stride;
            const int in = head * a.page_tokens + p - page_of(a, p) * a.page_tokens;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int width = part ? a.v_width : a.head_width;
                const uint8_t *base = a.kv + (part ? a.v_offset : a.k_offset);
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    const int i = j * 32 + lane, row = i / kPieces, piece = i % kPieces;
                    const uint8_t *from = base + __shfl_sync(~0u, page_at, row);
                    const int64_t element = static_cast<int64_t>(__shfl_sync(~0u, in, row)) * width + piece * kPer;
                    const bool ok = first + row >= low && first + row < high && piece * kPer < width;
                    const uint32_t offset = part * kBytes + block_offset<kP>(row, piece);
                    if constexpr (kKind == kF32)
                        *reinterpret_cast<uint4 *>(to + offset) = ok ? load_kv8(from, element, PK_F32) : make_uint4(0, 0, 0, 0);
                    else
                        copy16_async(shared_address(to) + offset, ok ? from + (element << kShift<kKind>) : a.kv, ok);
                }
            }
            if constexpr (kKind == kF32)
                ring_arrive(&full[put]);
            else
                ring_arrive_copies(&full[put]);
        }
        if (++put == kStages) put = 0;
    }

    // The same for the next group, by tensor copies.
    __device__ __forceinline__ void copy() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint32_t to = shared_address(ring) + put * 2 * kBytes;
        const int of_box = __shfl_sync(~0u, page, (issued - known) * kBoxes + (kBoxes > 1 ? lane >> 4 : 0));
        if (lane == 0) barrier_expect(&full[put], 2 * kBytes);
        if constexpr (kBoxes > 1) __syncwarp();
        if ((lane & 15) == 0 && lane < kSize) {  // a box holds 16 positions
            const int row = (asks_row + ((asks_at + lane) & (a.page_tokens - 1))) >> 3;
            if constexpr (kOnce) {
                copy_page_once(to + lane * kP * 128, &maps.k, row, of_box, &full[put]);
                copy_page_once(to + kBytes + lane * kP * 128, &maps.v, row, of_box, &full[put]);
            } else {
                copy_page(to + lane * kP * 128, &maps.k, row, of_box, &full[put]);
                copy_page(to + kBytes + lane * kP * 128, &maps.v, row, of_box, &full[put]);
            }
        }
#endif
        asks_at += kSize << team.shift;
        if (++put == kStages) put = 0;
    }

    // Asks ahead until `wanted` groups from the start of `s` are on their way, running on into `next`.
    __device__ __forceinline__ void fetch_until(const Segment &s, const Segment &next, int wanted) {
        wanted = min(wanted, both);
        if constexpr (kTensor) {
#pragma unroll 1
            for (; issued < wanted; ++issued) {
                if (issued == looked) {
                    page = page_after;
                    known = issued;
                    looked = min(issued + kKnown, issued < mine ? mine : both);
                    if (looked < mine) page_after = look_boxes(s, looked);
                    else if (looked < both) page_after = look_boxes(next, looked - mine);
                }
                copy();
                if (issued + 1 == mine && mine < both) turn_to(next);
            }
        } else {
#pragma unroll 1
            for (;;) {
                // Pages are known two groups ahead: under load a look takes as long as a group.
#pragma unroll 1
                while (looked < min(issued + 2, both)) {
                    const bool here = looked < mine;
                    const int found = look_page(here ? s.pages : next.pages, here ? first_of(s, looked) : first_of(next, looked - mine), here ? s.first : next.first, here ? s.end : next.end);
                    if (looked++ == issued)
                        page = found;
                    else
                        page_after = found;
                }
                if (issued >= wanted) return;
                const bool here = issued < mine;
                fetch(here ? first_of(s, issued) : first_of(next, issued - mine), here ? s.head : next.head, here ? s.first : next.first, here ? s.end : next.end);
                ++issued;
                page = page_after;
            }
        }
    }

    // Waits for the next group; unwritten values (which may be no numbers) become zeros.
    __device__ __forceinline__ uint8_t *wait(const Segment &s, int first) {
        while (!ring_ready(&full[take], take_turn)) {}
        uint8_t *at = ring + take * 2 * kBytes;
        if (++take == kStages) {
            take = 0;
            take_turn ^= 1;
        }
        if (kTensor && (first < s.first || first + kSize > s.end)) {
#pragma unroll 2
            for (int i = lane; i < kSize * kP * 8; i += 32) {
                const int p = first + i / (kP * 8);
                if (p < s.first || p >= s.end) *reinterpret_cast<uint4 *>(at + kBytes + block_offset<kP>(i / (kP * 8), i % (kP * 8))) = make_uint4(0, 0, 0, 0);
            }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            if constexpr (kTensor) fence_async_proxy();
#endif
            __syncwarp();
        }
        return at;
    }
};

}  // namespace ring
}  // namespace pk
