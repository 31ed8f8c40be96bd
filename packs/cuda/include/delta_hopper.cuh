// Chunks of a gated delta net on Hopper: the kernel that makes U, W, P and G of all chunks, and the scan from chunk to chunk.
#pragma once
#include "delta_chunk.cuh"
#include "wgmma_attention.cuh"

namespace pk {
namespace {

// ---- all chunks side by side, as delta_mma.cuh's. Grid: slots of the segment, value heads ----

constexpr int kPrepareHopper = 3 * kWideBytes + kNarrowBytes + kChunk * kMatrixStride * 4 + 2 * kChunk * 4 + 16 + 1024;

__device__ __forceinline__ void join_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void store_bytes(void *global, uint32_t shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}

// The same on Hopper: one warpgroup makes A and U, the other P and W; what goes to memory is put together in shared memory first, U over V and W
// over K.
__global__ void __launch_bounds__(kThreads, 3) delta_chunk_hopper_kernel(const __grid_constant__ ChunkArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) uint8_t dynamic[];
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int slot = a.first_slot + blockIdx.x;
    const Chunk chunk = chunk_of(d, slot);
    if (chunk.n == 0) return;
    const int h = blockIdx.y, g = key_head_of(d, h), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = tid >> 7;
    uint8_t *qs = dynamic + (-shared_address(dynamic) & 1023), *ks = qs + kWideBytes, *vs = ks + kWideBytes, *ps = vs + kWideBytes;
    float *matrix = reinterpret_cast<float *>(ps + kNarrowBytes), *decay = matrix + kChunk * kMatrixStride, *beta = decay + kChunk;
    const int64_t token = d.state.row_start[chunk.row] + chunk.first, item = static_cast<int64_t>(blockIdx.x) * d.n_v_heads + h;
    uint64_t *arrived = reinterpret_cast<uint64_t *>(beta + kChunk);  // q and k; v
    if (tid == 128) {
        barrier_init(arrived, 1);
        barrier_init(arrived + 1, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(arrived, 2 * kWideBytes);
        copy_bytes(shared_address(qs), mixed_tile(a, slot, g), kWideBytes, arrived);
        copy_bytes(shared_address(ks), mixed_tile(a, slot, d.n_k_heads + g), kWideBytes, arrived);
        barrier_expect(arrived + 1, kWideBytes);
        copy_bytes(shared_address(vs), mixed_tile(a, slot, 2 * d.n_k_heads + h), kWideBytes, arrived + 1);
    }
    put_decays(d, token, chunk.n, h, decay, beta);
    __syncthreads();
    barrier_wait(arrived, 0);
    const int row = (warp & 3) * 16 + (lane >> 2), c = 2 * (lane & 3);
    float x[32];
    {
        // K K^T or Q K^T.
        const uint32_t left = shared_address(group ? qs : ks), right = shared_address(ks);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
            const int at = (k >> 2) * kNarrowBytes + (k & 3) * 32;
            wgmma_scores_bf16(x, matrix_descriptor(left + at), matrix_descriptor(right + at), k > 0);
        }
        wgmma_commit();
        if (tid < kChunk) a.decay[item * kChunk + tid] = decay[tid];
        wgmma_wait<0>();
        settle(x);
        // Of a warp's 16 rows all columns up to the last of them count.
        const int last = (warp & 3) * 16 + 15;
        const float now[2] = {decay[row], decay[row + 8]};
        auto each_pair = [&](auto &&store) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int s = 8 * n + c;
                float v[4] = {};
                if (8 * n <= last) {
                    const float2 then = *reinterpret_cast<const float2 *>(decay + s);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        v[2 * half] = x[4 * n + 2 * half] * exp_of_two(now[half] - then.x);
                        v[2 * half + 1] = x[4 * n + 2 * half + 1] * exp_of_two(now[half] - then.y);
                    }
                }
                store(n, s, v);
            }
        };
        if (group) {
            each_pair([&](int n, int s, const float (&v)[4]) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int t = row + 8 * half;
                    *reinterpret_cast<uint32_t *>(ps + narrow(t, n) + 2 * c) = pack_bf16(s <= t ? v[2 * half] : 0.0f, s < t ? v[2 * half + 1] : 0.0f);
                }
            });
        } else {
            const float factor[2] = {beta[row], beta[row + 8]};
            each_pair([&](int, int s, const float (&v)[4]) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int t = row + 8 * half;
                    *reinterpret_cast<float2 *>(matrix + t * kMatrixStride + s) = make_float2(s < t ? v[2 * half] * factor[half] : 0.0f, s + 1 < t ? v[2 * half + 1] * factor[half] : 0.0f);
                }
            });
        }
    }
    barrier_wait(arrived + 1, 0);
    fence_async_proxy();
    __syncthreads();
    if (tid == 128) store_bytes(a.p + item * kNarrowBytes, shared_address(ps), kNarrowBytes);
    invert(matrix, reinterpret_cast<float *>(qs));
    // T diag(beta) or T diag(beta e^G) as fragments.
    uint32_t left[4][4];
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int s = 16 * k + 8 * i + c;
            float2 by = *reinterpret_cast<const float2 *>(beta + s);
            if (group) {
                const float2 then = *reinterpret_cast<const float2 *>(decay + s);
                by = make_float2(by.x * exp_of_two(then.x), by.y * exp_of_two(then.y));
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 v = *reinterpret_cast<const float2 *>(matrix + (row + 8 * half) * kMatrixStride + s);
                left[k][2 * i + half] = pack_bf16(v.x * by.x, v.y * by.y);
            }
        }
    uint8_t *tile = group ? ks : vs;
    // A loop, since ptxas takes both sides for one when they follow each other.
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k)
            wgmma_bf16_registers_n64_transposed(x, left[k][0], left[k][1], left[k][2], left[k][3], matrix_descriptor(shared_address(tile) + side * kNarrowBytes + k * 2048), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(x);
        join_group(group);  // this side of the tile has been read
#pragma unroll
        for (int i = 0; i < 16; ++i) *reinterpret_cast<uint32_t *>(tile + side * kNarrowBytes + narrow(row + 8 * (i & 1), i >> 1) + 2 * c) = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
    fence_async_proxy();
    join_group(group);
    if ((tid & 127) == 0) {
        store_bytes((group ? a.w : a.u) + item * kWideBytes, shared_address(tile), kWideBytes);
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#endif
}

// ---- from chunk to chunk, as delta_scan_kernel, and what delta_finish_kernel does. Grid: value heads x slices of 64 columns, rows ----

// The two blocks of a head are a cluster: each fetches half of W, Q, K and P for both. One warpgroup makes D, the other O, each half of
// the state; P D of a chunk is added while the next one begins. All operands come from shared memory; D takes U's place. A third warpgroup norms, gates and
// stores what the second has left it; sums of squares over half a head go to the other block. W and Q (with G) are done with before K, P and U are wanted, so the two parts
// of a stage come and go by themselves.
constexpr int kScanThreads = kThreads + 2 * 128, kHopperStage = 3 * kWideBytes + 2 * kNarrowBytes, kQueriesAt = kWideBytes, kKeysAt = 2 * kWideBytes, kScoresAt = 3 * kWideBytes, kValuesAt = kScoresAt + kNarrowBytes;
constexpr int kStateAt = kHopperStages * kHopperStage, kChangesAt = kStateAt + kWideBytes, kOutAt = kChangesAt + kNarrowBytes, kDecaysAt = kOutAt + kNarrowBytes;
// Sums of the block's own columns, then the other's of six chunks: it may be four ahead, and a chunk is finished one later.
constexpr int kSumsAt = kDecaysAt + kHopperStages * kChunk * 4, kSumsKept = 6, kBarriersAt = kSumsAt + (1 + kSumsKept) * kChunk * 4, kScanHopper = kBarriersAt + (4 * kHopperStages + kSumsKept) * 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d[64, 64] (+)= a[64, 16] b[16, 64], both in shared memory, b with its columns contiguous, a with its rows, or (kTransposed) its columns.
template <bool kTransposed>
__device__ __forceinline__ void wgmma_tile(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed));
}
__device__ __forceinline__ void copy_bytes_to_both(uint32_t shared, const void *global, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global), "r"(bytes), "r"(shared_address(barrier)),
                 "h"(static_cast<uint16_t>(3))
                 : "memory");
}
// Of two warpgroups: both wait; or this one does not.
__device__ __forceinline__ void meet(int what) { asm volatile("bar.sync %0, 256;" ::"r"(what) : "memory"); }
__device__ __forceinline__ void tell(int what) { asm volatile("bar.arrive %0, 256;" ::"r"(what) : "memory"); }
// At the same place of block `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void store_at(const float *to, float v, const uint64_t *barrier, int rank) {
    asm volatile("{\n.reg .b32 there, b;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\nst.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [b];\n}\n" ::"r"(shared_address(to)), "f"(v),
                 "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
#endif

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kScanThreads, 1) delta_scan_hopper_kernel(const __grid_constant__ ChunkArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t whole[];
    uint8_t *const shared = whole;
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + kBarriersAt), *late = full + kHopperStages, *empty = late + kHopperStages, *late_empty = empty + kHopperStages, *summed = late_empty + kHopperStages;
    float *own = reinterpret_cast<float *>(shared + kSumsAt), *others = own + kChunk;
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int r = blockIdx.y;
    if (r >= d.info->n_rows) return;
    const RecurrentRow q = recurrent_row(d.state, r);
    if (q.is_dead || q.n <= d.most) return;
    const int base = q.first / kChunk + r, begin = max(a.first_slot, base), end = min(a.first_slot + a.n_slots, base + (q.n + kChunk - 1) / kChunk);
    if (begin >= end) return;
    const int h = blockIdx.x >> 1, rank = blockIdx.x & 1, lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSumsKept; ++i) barrier_init(summed + i, 1);
        for (int i = 0; i < 2 * kHopperStages; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 2 * kThreads / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (warp >= kThreads / 32 + 4) {
        fewer_registers<40>();
        const int g = key_head_of(d, h);
        if (warp == kThreads / 32 + 4 && lane == 0)
            for (int slot = begin, i = 0; slot < end; ++slot, ++i) {
                const int at = i % kHopperStages;
                const int64_t item = static_cast<int64_t>(slot - a.first_slot) * d.n_v_heads + h;
                const uint32_t stage = shared_address(shared) + at * kHopperStage, half = rank * kNarrowBytes;
                if (i >= kHopperStages) barrier_wait(empty + at, (i / kHopperStages - 1) & 1);
                barrier_expect(full + at, 2 * kWideBytes + kChunk * 4);
                copy_bytes_to_both(stage + half, a.w + item * kWideBytes + half, kNarrowBytes, full + at);
                copy_bytes_to_both(stage + kQueriesAt + half, mixed_tile(a, slot, g) + half, kNarrowBytes, full + at);
                copy_bytes(shared_address(shared) + kDecaysAt + at * kChunk * 4, a.decay + item * kChunk, kChunk * 4, full + at);
                if (i >= kHopperStages) barrier_wait(late_empty + at, (i / kHopperStages - 1) & 1);
                barrier_expect(late + at, kHopperStage - 2 * kWideBytes);
                copy_bytes_to_both(stage + kKeysAt + half, mixed_tile(a, slot, d.n_k_heads + g) + half, kNarrowBytes, late + at);
                copy_bytes(stage + kValuesAt, a.u + item * kWideBytes + half, kNarrowBytes, late + at);
                copy_bytes_to_both(stage + kScoresAt + half / 2, a.p + item * kNarrowBytes + half / 2, kNarrowBytes / 2, late + at);
            }
        __syncwarp();
        cluster_sync();
        return;
    }
    if (warp >= kThreads / 32) {
        fewer_registers<112>();
        // Eight columns of four rows a thread.
        const int tid = threadIdx.x & 127, piece = tid & 7, column = h * kWidth + rank * kSlice + 8 * piece;
        auto is_wide = [](const void *p, int64_t stride, int32_t format) { return format == PK_BF16 && stride % 8 == 0 && reinterpret_cast<uint64_t>(p) % 16 == 0; };
        const bool is_whole = is_wide(d.out, d.out_stride, d.out_format) && is_wide(d.z, d.z_stride, d.z_format);
        float scale[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) scale[e] = d.scale[rank * kSlice + 8 * piece + e];
        // A chunk is finished while the next one is made: its gates and the other block's sums are there by then.
        uint4 z[4], o[4];
        float squares[4];
        auto ask_gates = [&](int first) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (is_whole && first + 16 * k < q.n) z[k] = *reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(d.z) + (q.first + first + 16 * k) * d.z_stride + column);
        };
        auto finish = [&](int i) {
            const int first = (begin + i - base) * kChunk + (tid >> 3), kept = i % kSumsKept;
            barrier_wait(summed + kept, (i / kSumsKept) & 1);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (first + 16 * k >= q.n) continue;
                const int64_t token = q.first + first + 16 * k;
                const float by = rsqrtf((squares[k] + others[kept * kChunk + (tid >> 3) + 16 * k]) * (1.0f / kWidth) + d.eps);
                if (!is_whole) {
                    // By the piece that was read from shared memory: an element at a time.
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const uint32_t pair = (&o[k].x)[e >> 1];
                        store_from_f32(d.out, token * d.out_stride + column + e, d.out_format, (e & 1 ? high_f32(pair) : low_f32(pair)) * by * scale[e] * gate_of(d, load_as_f32(d.z, token * d.z_stride + column + e, d.z_format)));
                    }
                    continue;
                }
                uint4 v;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t pair = (&o[k].x)[e], gates = (&z[k].x)[e];
                    (&v.x)[e] = pack_bf16(low_f32(pair) * by * scale[2 * e] * gate_of(d, low_f32(gates)), high_f32(pair) * by * scale[2 * e + 1] * gate_of(d, high_f32(gates)));
                }
                *reinterpret_cast<uint4 *>(static_cast<bf16 *>(d.out) + token * d.out_stride + column) = v;
            }
        };
        for (int i = 0; i < end - begin; ++i) {
            uint4 made[4];
            float sums[4];
            meet(3);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                made[k] = *reinterpret_cast<const uint4 *>(shared + kOutAt + narrow((tid >> 3) + 16 * k, piece));
                sums[k] = own[(tid >> 3) + 16 * k];
            }
            tell(4);
            if (i > 0) finish(i - 1);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                o[k] = made[k];
                squares[k] = sums[k];
            }
            ask_gates((begin + i - base) * kChunk + (tid >> 3));
        }
        finish(end - begin - 1);
        cluster_sync();
        return;
    }
    more_registers<168>();
    const int group = warp >> 2, srow = warp * 16 + (lane >> 2), scol = 2 * (lane & 3), row = (warp & 3) * 16 + (lane >> 2);
    const uint32_t ss = shared_address(shared) + kStateAt, changes = shared_address(shared) + kChangesAt;
    float *state = reinterpret_cast<float *>(q.memory + d.state_offset) + static_cast<int64_t>(h) * kWidth * kWidth + rank * kSlice;
    float s[32], x[32], o[32] = {};
    const bool is_zero = q.begins && begin == base;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 v = is_zero ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol);
            s[4 * n + 2 * half] = v.x;
            s[4 * n + 2 * half + 1] = v.y;
        }
    auto release = [&](const uint64_t *stage_empty) {
        __syncwarp();
        // What was read has been waited for: no fence, which barrier_arrive_at would be.
        if (lane < 2)
            asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(stage_empty)), "r"(lane) : "memory");
    };
    // What Q S of the chunk before gave, in o, and P D: to memory.
    auto ask_output = [&](int at) {
        const uint32_t stage = shared_address(shared) + at * kHopperStage;
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) wgmma_tile<false>(o, matrix_descriptor(stage + kScoresAt + 32 * k), matrix_descriptor(stage + kValuesAt + 2048 * k), 1);
        wgmma_commit();
    };
    // Chunk i's O to the warps that finish it.
    auto put_output = [&](int i) {
        if (i > 0) meet(4);
        const int kept = i % kSumsKept;
        if (threadIdx.x == kThreads - 128) barrier_expect(summed + kept, kChunk * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float squares = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const float low = o[4 * n + 2 * half], high = o[4 * n + 2 * half + 1];
                squares += low * low + high * high;
                *reinterpret_cast<uint32_t *>(shared + kOutAt + narrow(row + 8 * half, n) + 2 * scol) = pack_bf16(low, high);
            }
            squares += __shfl_xor_sync(~0u, squares, 1);
            squares += __shfl_xor_sync(~0u, squares, 2);
            if ((lane & 3) == 0) {
                own[row + 8 * half] = squares;
                store_at(others + kept * kChunk + row + 8 * half, squares, summed + kept, rank ^ 1);
            }
        }
        tell(3);
    };
    int before = 0;
    auto run = [&]<bool kMakesO>() {
        for (int slot = begin, i = 0; slot < end; ++slot, ++i) {
            const int at = i % kHopperStages;
            uint8_t *stage = shared + at * kHopperStage;
            const uint32_t tiles = shared_address(stage);
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) *reinterpret_cast<uint32_t *>(shared + kStateAt + narrow(srow + 8 * half, n) + scol * 2) = pack_bf16(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
            fence_async_proxy();
            meet(1);
            barrier_wait(full + at, (i / kHopperStages) & 1);
            // W S or Q S, behind P D of the chunk before.
            wgmma_fence();
            if constexpr (kMakesO) ask_output(i > 0 ? before : at);  // of the first chunk nothing is kept
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k)
                wgmma_tile<false>(x, matrix_descriptor(tiles + (kMakesO ? kQueriesAt : 0) + (k >> 2) * kNarrowBytes + 32 * (k & 3)), matrix_descriptor(ss + 2048 * k), k > 0);
            wgmma_commit();
            const float *decay = reinterpret_cast<const float *>(shared + kDecaysAt) + at * kChunk;
            const float last = decay[kChunk - 1], near[2] = {decay[row], decay[row + 8]}, shrink = exp_of_two(last);
            const float by[2] = {exp_of_two(kMakesO ? near[0] : last - near[0]), exp_of_two(kMakesO ? near[1] : last - near[1])};
            if constexpr (kMakesO) {
                wgmma_wait<1>();
                settle(o);
                if (i > 0) {
                    release(late_empty + before);
                    put_output(i - 1);
                }
            }
            wgmma_wait<0>();
            settle(x);
            release(empty + at);
            if constexpr (kMakesO) {
#pragma unroll
                for (int e = 0; e < 32; ++e) o[e] = x[e] * by[e >> 1 & 1];
                barrier_wait(late + at, (i / kHopperStages) & 1);
            } else {
                barrier_wait(late + at, (i / kHopperStages) & 1);
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t to = narrow(row + 8 * half, n) + 2 * scol;
                        uint32_t &u = *reinterpret_cast<uint32_t *>(stage + kValuesAt + to);
                        const float low = low_f32(u) - x[4 * n + 2 * half], high = high_f32(u) - x[4 * n + 2 * half + 1];
                        u = pack_bf16(low, high);
                        *reinterpret_cast<uint32_t *>(shared + kChangesAt + to) = pack_bf16(low * by[half], high * by[half]);
                    }
                fence_async_proxy();
            }
#pragma unroll
            for (int e = 0; e < 32; ++e) s[e] *= shrink;
            meet(2);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kChunk / 16; ++k) wgmma_tile<true>(s, matrix_descriptor(tiles + kKeysAt + group * kNarrowBytes + 2048 * k), matrix_descriptor(changes + 2048 * k), 1);
            wgmma_commit();
            wgmma_wait<0>();
            settle(s);
            if constexpr (!kMakesO) release(late_empty + at);
            before = at;
        }
        if constexpr (kMakesO) {
            wgmma_fence();
            ask_output(before);
            wgmma_wait<0>();
            settle(o);
            // No stage is waited for any more: the other block must not be further behind than before.
            const int n = end - begin, far = n - kHopperStages;
            if (far >= 0) barrier_wait(late_empty + far % kHopperStages, (far / kHopperStages) & 1);
            put_output(n - 1);
            meet(4);
        }
    };
    if (warp >= 4) run.template operator()<true>();
    else run.template operator()<false>();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) *reinterpret_cast<float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol) = make_float2(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
    cluster_sync();
#endif
}

// U, W, P and G of a segment's chunks, then the scan over them.
int32_t launch_segment(const Launch &l, const ChunkArguments &a, unsigned heads, unsigned rows) {
    if (int32_t e = launch(l, "delta_chunk", delta_chunk_hopper_kernel, dim3(a.n_slots, heads), dim3(kThreads), kPrepareHopper, a)) return e;
    return launch(l, "delta_scan", delta_scan_hopper_kernel, dim3(2 * heads, rows), dim3(kScanThreads), kScanHopper, a);
}

// The scan has normed and gated what it wrote.
int32_t launch_finish(const Launch &, const DeltaArguments &, unsigned, unsigned) { return PK_OK; }

}  // namespace
}  // namespace pk
