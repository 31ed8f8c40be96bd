// What the warps of the decode kernel (decode.cu) do by themselves: the list of work, and a ring of K and V that a warp fills and
// reads alone.
//
// Groups of positions come by one tensor copy a page and operand on Hopper where pages allow it, else by cp.async; bytes land
// as they are stored, FP8 becomes f16 in registers (F32 is narrowed before the store).
#pragma once
#include "attention_share.cuh"

#if defined(PK_WGMMA)
#include "wgmma_attention.cuh"
#endif

namespace pk {
namespace ring {

constexpr int kThreads = 128, kWarps = 4, kLeast = 128;  // positions worth a block

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

struct RowWork {
    int first, end, tiles, groups;  // visible positions, tiles of pairs, groups of positions
};

template <int kSize>
__device__ __forceinline__ RowWork row_work(const AttentionArguments &a, int start, int next, int position, int flags, int shared) {
    RowWork w;
    const int n = next - start, group = a.n_heads / a.n_kv_heads;
    w.first = a.window > 0 ? max(0, position - a.window + 1) : shared;
    w.end = position + n;
    w.tiles = is_decode_row(n, group) && !(flags & PK_ROW_DEAD) ? (n * group + 15) / 16 : 0;
    w.groups = (w.end + kSize - 1) / kSize - w.first / kSize;
    return w;
}

// Running sums of groups per row into `ends`; returns their number.
template <int kSize>
__device__ __forceinline__ int build_schedule(const AttentionArguments &a, int *ends, int *warps) {
    int carried = 0, n_rows = a.max_rows;
    for (int base = 0; base < n_rows; base += kThreads) {
        const int r = base + threadIdx.x;
        int work = 0;
        if (r < a.max_rows) {  // loaded before the number of rows is known
            const int start = a.row_start[r], next = a.row_start[r + 1], position = a.row_position[r], flags = a.row_flags[r];
            const int shared = a.share_rows != nullptr ? a.share_rows[r].tokens : 0;
            n_rows = a.info->n_rows;
            if (r < n_rows) {
                const RowWork w = row_work<kSize>(a, start, next, position, flags, shared);
                work = w.tiles * w.groups * a.n_kv_heads;
            }
        } else {
            n_rows = a.info->n_rows;
        }
        const int end = block_scan(work, warps) + carried;
        if (r < n_rows) ends[r] = end;
        if (threadIdx.x == kThreads - 1) warps[kWarps] = end;
        __syncthreads();
        carried = warps[kWarps];
    }
    return carried;
}

// Rows of one token: the most groups that a (row, head) has.
__device__ __forceinline__ int longest_head(const AttentionArguments &a, const int *ends, int *warps) {
    int most = 0;
    for (int r = threadIdx.x; r < a.info->n_rows; r += kThreads) most = max(most, ends[r] - (r ? ends[r - 1] : 0));
    most = __reduce_max_sync(~0u, most);
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) most = max(most, warps[i]);
    return most / a.n_kv_heads;
}

// Where the groups of (row, head) number `item` begin, of rows of one token.
__device__ __forceinline__ int head_start(const AttentionArguments &a, const int *ends, int item) {
    const int row = item / a.n_kv_heads, before = row ? ends[row - 1] : 0;
    return row < a.info->n_rows ? before + (ends[row] - before) / a.n_kv_heads * (item - row * a.n_kv_heads) : before;
}

// A run's part of one (row, head, tile).
struct Segment {
    const int32_t *pages;
    int start, n_pairs, position, head, pair;  // the row, and the tile's first pair
    int first, end;                            // positions the row sees
    int group, n_groups;                       // first group of positions, and how many
    int block_first, block_last;               // blocks that share the (row, head, tile)
    bool is_first;                             // begins in this block
    ShareRow share;
};

template <int kSize>
__device__ __forceinline__ Segment find_segment(const AttentionArguments &a, const int *ends, int at, int until, int per) {  // per 0: runs are of whole heads
    Segment s;
    int low = 0, high = a.info->n_rows - 1;
    while (low < high) {
        const int mid = (low + high) >> 1;
        if (ends[mid] > at) high = mid; else low = mid + 1;
    }
    s.start = a.row_start[low];
    s.position = a.row_position[low];
    const int next = a.row_start[low + 1], slot = a.row_slot[low], before = low ? ends[low - 1] : 0, group = a.n_heads / a.n_kv_heads;
    s.share = a.share_rows != nullptr ? a.share_rows[low] : ShareRow{};
    const RowWork w = row_work<kSize>(a, s.start, next, s.position, 0, s.share.tokens);
    const int local = at - before, which = local / w.groups, in = local - which * w.groups, whole = at - in;
    s.pages = a.page_table + static_cast<int64_t>(slot) * a.slot_pages;
    s.n_pairs = (next - s.start) * group;
    s.head = which / w.tiles;
    s.pair = (which - s.head * w.tiles) * 16;
    s.first = w.first;
    s.end = w.end;
    s.group = w.first / kSize + in;
    s.n_groups = min(w.groups - in, until - at);
    s.block_first = per > 0 ? whole / per : blockIdx.x;
    s.block_last = per > 0 ? (whole + w.groups - 1) / per : blockIdx.x;
    s.is_first = in == 0;
    return s;
}

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

// The block asks for a tile's q (16 rows, pieces of a row permuted by the row); `full` counts every thread once.
template <int kD>
__device__ __forceinline__ void ask_q(const AttentionArguments &a, const Segment &s, uint8_t *to, uint64_t *full) {
    const int group = a.n_heads / a.n_kv_heads;
    const bool wide = a.q_format == PK_BF16 && a.q_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.q) % 16 == 0;
#pragma unroll(kHoldQ<kD> ? 16 : 1)  // of wide heads one copy: what runs once a launch comes from L2 instruction by instruction
    for (int j = 0; j < 16 * kQPieces<kD> / kThreads; ++j) {
        const int i = j * kThreads + threadIdx.x, row = i / kQPieces<kD>, piece = i % kQPieces<kD>, pair = s.pair + row, token = pair / group;
        const bool ok = pair < s.n_pairs && piece * 8 < a.head_width;
        const int64_t from = ok ? static_cast<int64_t>(s.start + token) * a.q_stride + (s.head * group + pair - token * group) * a.head_width + piece * 8 : 0;
        uint8_t *at = to + row * kQPieces<kD> * 16 + ((piece ^ (row & 7)) << 4);
        if (wide) {
            copy16_async(shared_address(at), static_cast<const bf16 *>(a.q) + from, ok);
        } else {
#pragma unroll 1
            for (int e = 0; e < 4; ++e) reinterpret_cast<uint32_t *>(at)[e] = ok ? load_q_pair(a, from + 2 * e) : 0;
        }
    }
    if (wide)
        ring_arrive_copies(full);
    else
        ring_arrive(full);
}

// The fragment of a k step.
template <int kD, int kKind>
__device__ __forceinline__ void read_q(uint32_t (&q)[4], const uint8_t *from, int k) {
    const int row = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = q_column<kKind>(k, e);
            uint32_t v;  // volatile: else the compiler keeps all of a wide head's q in registers that it does not have
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(from) + (row + 8 * h) * kQPieces<kD> * 16 + (((column >> 3) ^ row) << 4) + (column & 7) * 2));
            if constexpr (kHalfMath<kKind>) v = pack2<true>(low_f32(v), high_f32(v));
            q[h + 2 * e] = v;
        }
}

template <int kD, int kKind, bool kTensor>
struct Warp {
    static constexpr int kStages = kRingStages<kD, kKind>, kP = kPanels<kD, kKind>, kBytes = kOperandBytes<kD, kKind>, kSize = kGroup<kD, kKind>;
    const AttentionArguments &a;
    const Maps &maps;
    uint8_t *ring;
    uint64_t *full;
    int lane, warp;
    int issued = 0, looked = 0, put = 0, take = 0;  // groups asked for, and pages known, from the start of the current segment; ring positions
    int page = 0, page_after = 0;                   // of the groups `issued` and after it, as far as looked up
    uint32_t put_turn = 0, take_turn = 0;

    __device__ __forceinline__ int n_mine(const Segment &s) const { return (s.n_groups - warp + kWarps - 1) / kWarps; }
    __device__ __forceinline__ int first_of(const Segment &s, int n) const { return (s.group + n * kWarps + warp) * kSize; }

    __device__ __forceinline__ int look_page(const int32_t *pages, int first, int low, int high) const { return pages[page_of(a, min(max(first + (lane & (kSize - 1)), low), high - 1))]; }

    // Asks for the group of positions that begins at `first`, of a row that sees [low, high); `page` holds its page.
    __device__ __forceinline__ void fetch(int first, int head, int low, int high) {
        uint8_t *to = ring + put * 2 * kBytes;
        if constexpr (kTensor) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            if (lane == 0) barrier_expect(&full[put], 2 * kBytes);
            __syncwarp();
            if ((lane & 15) == 0 && lane < kSize) {  // a box holds 16 positions
                const int row = (head * a.page_tokens + ((first + lane) & (a.page_tokens - 1))) >> 3;
                copy_page(shared_address(to) + lane * kP * 128, &maps.k, row, page, &full[put]);
                copy_page(shared_address(to) + kBytes + lane * kP * 128, &maps.v, row, page, &full[put]);
            }
#endif
        } else {
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

    // Asks ahead until `wanted` groups from the start of `s` are on their way, running on into `next`.
    __device__ __forceinline__ void fetch_until(const Segment &s, const Segment &next, bool has_next, int wanted) {
        const int mine = n_mine(s), both = mine + (has_next ? n_mine(next) : 0);
        wanted = min(wanted, both);
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

    // Waits for the next group; unwritten values (which may be no numbers) become zeros.
    __device__ __forceinline__ uint8_t *wait(const Segment &s, int first) {
        while (!ring_ready(&full[take], take_turn)) {}
        uint8_t *at = ring + take * 2 * kBytes;
        if (++take == kStages) {
            take = 0;
            take_turn ^= 1;
        }
        if (kTensor && (first < s.first || first + kSize > s.end)) {
#pragma unroll 1
            for (int r = 0; r < kSize; ++r)
                if ((first + r < s.first || first + r >= s.end) && lane < kP * 8) *reinterpret_cast<uint4 *>(at + kBytes + block_offset<kP>(r, lane)) = make_uint4(0, 0, 0, 0);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            if constexpr (kTensor) fence_async_proxy();
#endif
            __syncwarp();
        }
        return at;
    }

    // s[16 pairs, positions] = q k^T.
    __device__ __forceinline__ void scores(float (&s)[kSize / 8][4], const uint32_t (&held)[kHoldQ<kD> ? kD / 16 : 1][4], const uint8_t *q_at, uint32_t k_at) {
        float more[2][4] = {};
#pragma unroll
        for (int t = 0; t < kSize / 8; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[t][e] = 0.0f;
        const int row = (lane & 7) + ((lane >> 4) << 3), odd = (lane >> 3) & 1;
        constexpr int kPer = kKind == kFp8 ? 2 : 1;  // k steps of a 16-byte piece
#pragma unroll
        for (int k = 0; k < kD / 16 / kPer; ++k) {
            uint32_t q[kPer][4];
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
                if constexpr (kHoldQ<kD>) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) q[i][e] = held[k * kPer + i][e];
                } else {
                    read_q<kD, kKind>(q[i], q_at, k * kPer + i);
                }
            }
#pragma unroll
            for (int u = 0; u < kSize / 16; ++u) {
                uint32_t b[4];
                load_matrix4(b, k_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * k + odd));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    if constexpr (kKind == kFp8) {
                        multiply<true>(s[2 * u + t], q[0], halves(b[2 * t], 0), halves(b[2 * t], 1));
                        multiply<true>(kSize == 16 ? more[t] : s[2 * u + t], q[1], halves(b[2 * t + 1], 0), halves(b[2 * t + 1], 1));
                    } else {  // chains of few products
                        multiply<kHalfMath<kKind>>(kSize == 16 && (k & 1) ? more[t] : s[2 * u + t], q[0], b[2 * t], b[2 * t + 1]);
                    }
                }
            }
        }
        if constexpr (kSize == 16) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[t][e] += more[t][e];
        }
    }

    __device__ __forceinline__ void values(float (&o)[kD / 8][4], const uint32_t (&p)[kSize / 16][4], uint32_t v_at) {
        const int row = (lane & 7) + ((lane >> 3) & 1) * 8, odd = lane >> 4;
#pragma unroll
        for (int u = 0; u < kSize / 16; ++u)
#pragma unroll
            for (int m = 0; m < (kKind == kFp8 ? kD / 32 : kD / 16); ++m) {
                uint32_t b[4];
                load_matrix4_transposed(b, v_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * m + odd));
                if constexpr (kKind == kFp8) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] = __byte_perm(b[i], 0, 0x3120);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int parity = 0; parity < 2; ++parity) multiply<true>(o[4 * m + 2 * i + parity], p[u], halves(b[2 * i], parity), halves(b[2 * i + 1], parity));
                } else {
                    multiply<kHalfMath<kKind>>(o[2 * m], p[u], b[0], b[1]);
                    multiply<kHalfMath<kKind>>(o[2 * m + 1], p[u], b[2], b[3]);
                }
            }
    }
};

}  // namespace ring
}  // namespace pk
