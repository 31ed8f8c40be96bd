// Experts of few pairs on Hopper, BF16 and e4m3, in one launch: weights through a deep ring of tensor copies, at the speed of reading them.
//
// Tasks are the groups of rows of all items, first those of gate and up, then those of `down`, both dealt out evenly over blocks that stay; a block
// takes neighbours, so that it waits for hidden values of blocks beside it at most. One warp asks for the weights of all its tasks in turn, so that what
// stands between tasks (x of the next item, sums, waiting) is hidden behind what is under way. A stage is a box of 128 rows of 128 bytes: 16 rows times
// warps_k units of K for each of 8 / warps_k teams of warps. A warp has a unit of 16 rows; those of a team split K. Up to eight or sixteen pairs stand on
// the N side of mma.sync m16n8k16. e4m3 becomes f16 by the conversion unit, two codes an instruction, and x is f16 over a power of two of its row.
// Weights are the first to leave the second-level cache (once.cuh). All blocks must find room at once.
#include <cuda.h>

#include <algorithm>

#include "../../include/experts_few.cuh"
#include "../../include/experts_piece.cuh"
#include "../../include/lone_row.cuh"
#include "../../include/once.cuh"
#include "../../include/ring_turn.cuh"
#include "../../include/shared_load.cuh"

namespace pk {

bool has_wgmma(const pk_ctx *ctx);

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps + 32, kStageBytes = 128 * 128, kMostStages = 12, kLeastStages = 4;
constexpr int64_t kMostShared = 226 << 10;

struct Maps {
    CUtensorMap w[3];
};

// Of gate and up, and of `down`.
struct Shape {
    int32_t n_stages, warps_k[2], x_row_bytes[2];
    int64_t bytes;
};

struct Arguments {
    ExpertProduct p[2];
    int32_t *done;  // [items] rounds of warps that have written hidden values; zero before
    Shape shape;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void copy_units(uint32_t shared, const CUtensorMap *map, int row, int unit, int place, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared), "l"(map), "r"(shared_address(barrier)), "r"(0),
                 "r"(row), "r"(unit), "r"(place), "l"(kReadOnce)
                 : "memory");
}
#endif

// acc += the 16 rows of the unit at `w` (a lane's row, swizzled) times rows of x, eight a tile.
template <bool kFp8, int kTiles>
__device__ __forceinline__ void multiply_unit(uint32_t w, const uint32_t (&x)[kTiles], float factor, float (&acc)[kTiles][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
    const uint32_t near = w + ((2 * c ^ r) << 4), far = w + ((2 * c + 1 ^ r) << 4);
    const uint4 raw[4] = {ordered_load4(near), ordered_load4(near + 1024), ordered_load4(far), ordered_load4(far + 1024)};
    float sum[2][kTiles][4] = {};
    if constexpr (kFp8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 &u = raw[i & 2], &v = raw[(i & 2) + 1];
            const uint32_t upper[2] = {i & 1 ? u.z : u.x, i & 1 ? u.w : u.y}, lower[2] = {i & 1 ? v.z : v.x, i & 1 ? v.w : v.y};
            const uint32_t a[2][4] = {{e4m3_pair(upper[0], false), e4m3_pair(lower[0], false), e4m3_pair(upper[0], true), e4m3_pair(lower[0], true)},
                                      {e4m3_pair(upper[1], false), e4m3_pair(lower[1], false), e4m3_pair(upper[1], true), e4m3_pair(lower[1], true)}};
#pragma unroll
            for (int q = 0; q < kTiles; ++q) {
                const uint4 y = ordered_load4(x[q] + 64 * i);
                mma_f16_row(sum[0][q], a[0][0], a[0][1], a[0][2], a[0][3], y.x, y.y);
                mma_f16_row(sum[1][q], a[1][0], a[1][1], a[1][2], a[1][3], y.z, y.w);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 &u = raw[2 * i], &v = raw[2 * i + 1];
#pragma unroll
            for (int q = 0; q < kTiles; ++q) {
                const uint4 y = ordered_load4(x[q] + 64 * i);
                mma_bf16(sum[0][q], u.x, v.x, u.y, v.y, y.x, y.y);
                mma_bf16(sum[1][q], u.z, v.z, u.w, v.w, y.z, y.w);
            }
        }
    }
#pragma unroll
    for (int q = 0; q < kTiles; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] = fmaf(factor, sum[0][q][e] + sum[1][q][e], acc[q][e]);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ ExpertItem few_item(const ExpertProduct &p, int index) {
    const int4 v = __ldg(reinterpret_cast<const int4 *>(p.items) + index);
    return {v.x, v.y, v.z, v.w};
}

// A block's tasks of one of the two products.
struct Tasks {
    int warps_k, out_rows, n_groups, n_steps, begin, end;

    __device__ __forceinline__ Tasks(const ExpertProduct &p, int warps_k, int n_items) : warps_k(warps_k) {
        out_rows = 16 * (kWarps / warps_k);
        n_groups = (p.n_rows + out_rows - 1) / out_rows;
        n_steps = (p.n_units + warps_k - 1) / warps_k;
        const int64_t n_tasks = static_cast<int64_t>(n_items) * n_groups;
        begin = static_cast<int>(n_tasks * blockIdx.x / gridDim.x);
        end = static_cast<int>(n_tasks * (blockIdx.x + 1) / gridDim.x);
    }
};

// Where a producer or a consumer is in the ring.
struct Turn {
    int n_stages, stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit Turn(int n) : n_stages(n) {}
    __device__ __forceinline__ void advance() {
        if (++stage == n_stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Asks for the weights of a block's tasks; one thread.
template <int kSides>
__device__ __forceinline__ void ask_all(const ExpertProduct &p, const Tasks &t, const CUtensorMap *maps, uint32_t ring, uint64_t *full, uint64_t *empty, Turn &turn) {
    if (t.begin == t.end) return;
    const int last = (t.end - 1) / t.n_groups;
    int index = t.begin / t.n_groups, group = t.begin - index * t.n_groups, place = few_item(p, index).place, next_place = few_item(p, min(index + 1, last)).place;
    for (int task = t.begin; task < t.end; ++task) {
        const int row = p.first_row + group * t.out_rows;
        for (int step = 0; step < t.n_steps; ++step)
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
                barrier_wait(empty + turn.stage, turn.phase ^ 1);
                barrier_expect(full + turn.stage, kStageBytes);
                copy_units(ring + turn.stage * kStageBytes, maps + side, row, step * t.warps_k, place, full + turn.stage);
                turn.advance();
            }
        if (++group == t.n_groups) {
            group = 0;
            ++index;
            place = next_place;
            next_place = few_item(p, min(index + 1, last)).place;
        }
    }
}

// Eight values of a row of x. Hidden values other blocks have written just now.
template <bool kHidden>
__device__ __forceinline__ void load_x(const ExpertProduct &p, int64_t at, float (&v)[8]) {
    if constexpr (!kHidden) return load8(p.x, at, p.x_format, v);
    const uint4 raw = __ldcg(reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(p.x) + at));
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = low_f32(w[i]);
        v[2 * i + 1] = high_f32(w[i]);
    }
}

struct Memory {
    uint8_t *ring, *xs;
    float *sums, *row_factors;
    uint64_t *full, *empty;
};

// A block's tasks of gate and up (two sides) or of `down`, by the warps that multiply. done: see Arguments; rounds: of an item.
template <bool kFp8, int kTiles, int kSides>
__device__ __forceinline__ void make_all(const ExpertProduct &p, const Tasks &t, int x_row_bytes, const Memory &m, Turn &turn, int32_t *done, int rounds) {
    constexpr int kRows = 16 * kSides, kColumns = 8 * kTiles + 1, kElements = kFp8 ? 128 : 64, kSumFloats = kWarps * kRows * kColumns;
    if (t.begin == t.end) return;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3, wk = warp % t.warps_k, team = warp / t.warps_k, n_units = p.n_units;
    auto all_sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory"); };
    auto team_sync = [&] {
        if (t.warps_k > 1) asm volatile("bar.sync %0, %1;" ::"r"(2 + team), "r"(32 * t.warps_k) : "memory");
        else __syncwarp();
    };
    // Of the units wk + lane * warps_k of a group's rows.
    auto factor_of = [&](int place, int group, int side) {
        const ExpertWeight &w = p.w[side];
        const int unit = wk + lane * t.warps_k, row = p.first_row + group * t.out_rows + 16 * team;
        if (!kFp8 || w.block_scale_at < 0) return 1.0f;
        return unit < n_units && row < w.rows ? __ldg(reinterpret_cast<const float *>(w.data + place * w.stride + w.block_scale_at) + (row >> 7) * w.block_stride + unit) : 0.0f;
    };
    // x of an item, eight elements a lane; e4m3: over a power of two of the row.
    auto stage_rows = [&](const ExpertItem &item) {
        for (int n = warp; n < item.count; n += kWarps) {
            const int64_t from = x_row_of(p, item.first + n) * p.x_stride;
            RowScale scale;
            if constexpr (kFp8) {
                float most = 0.0f;
#pragma unroll 4
                for (int k = lane * 8; k < p.k; k += 256) {
                    float v[8];
                    load_x<kSides == 1>(p, from + k, v);
#pragma unroll
                    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
                }
                scale = RowScale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most))));
            }
            if (lane == 0) m.row_factors[n] = scale.factor;
#pragma unroll 4
            for (int k = lane * 8; k < n_units * kElements; k += 256) {
                float v[8] = {};
                if (k < p.k) load_x<kSides == 1>(p, from + k, v);
                uint4 packed = pack8(v);
                if constexpr (kFp8) {
                    uint32_t *w = &packed.x;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const __half2 h = __floats2half2_rn(v[2 * i] * scale.inverse, v[2 * i + 1] * scale.inverse);
                        w[i] = *reinterpret_cast<const uint32_t *>(&h);
                    }
                }
                // Of a unit lane c of a product has neighbours; pieces of 16 bytes lie so that its loads are beside those of the others.
                constexpr int kEach = kElements / 4;
                const int unit = k / kElements, in = k % kElements;
                *reinterpret_cast<uint4 *>(m.xs + n * x_row_bytes + unit * kElements * 2 + (in % kEach / 8 * 4 + in / kEach) * 16) = packed;
            }
        }
    };
    int index = t.begin / t.n_groups, group = t.begin - index * t.n_groups, done_here = 0, half = 0;
    ExpertItem item = few_item(p, index);
    float factors[2] = {factor_of(item.place, group, 0), factor_of(item.place, group, kSides - 1)};
    bool is_new = true;
    uint32_t x_lane[kTiles] = {};
    float whole[2] = {};
    const uint8_t *matrix[2] = {};
    const uint32_t ring = shared_address(m.ring);
    for (int task = t.begin; task < t.end; ++task) {
        if (is_new) {
            all_sync();
            if (kSides == 1) {
                if (lane == 0) {
                    int seen;
                    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(done + index) : "memory");
                    while (seen < rounds);
                }
                __syncwarp();
            }
            stage_rows(item);
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
                matrix[side] = p.w[side].data + item.place * p.w[side].stride;
                whole[side] = __ldg(reinterpret_cast<const float *>(matrix[side] + p.w[side].scale_at));
            }
            // Lanes past the pairs read one that is there; their columns are never stored.
#pragma unroll
            for (int q = 0; q < kTiles; ++q) x_lane[q] = shared_address(m.xs) + min(8 * q + r, item.count - 1) * x_row_bytes + 16 * c;
            all_sync();
        }
        const bool is_last = group + 1 == t.n_groups;
        const ExpertItem next = is_last && task + 1 < t.end ? few_item(p, index + 1) : item;
        float acc[kSides][kTiles][4] = {};
        for (int step = 0; step < t.n_steps; ++step) {
            const int unit = step * t.warps_k + wk;
            uint32_t x[kTiles];
#pragma unroll
            for (int q = 0; q < kTiles; ++q) x[q] = x_lane[q] + unit * kElements * 2;
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
                barrier_wait(m.full + turn.stage, turn.phase);
                const float factor = __shfl_sync(~0u, factors[side], step);
                // A box is unit by unit, of each the rows of all teams.
                if (unit < n_units) multiply_unit<kFp8, kTiles>(ring + turn.stage * kStageBytes + (wk * t.out_rows + 16 * team + r) * 128, x, factor, acc[side]);
                __syncwarp();
                if (lane == 0) barrier_arrive(m.empty + turn.stage);
                turn.advance();
            }
        }
        float next_factors[2] = {};
        if (task + 1 < t.end) {
#pragma unroll
            for (int side = 0; side < kSides; ++side) next_factors[side] = factor_of(next.place, is_last ? 0 : group + 1, side);
        }
        float *mine = m.sums + half * kSumFloats + warp * kRows * kColumns;
#pragma unroll
        for (int side = 0; side < kSides; ++side)
#pragma unroll
            for (int q = 0; q < kTiles; ++q)
#pragma unroll
                for (int e = 0; e < 4; ++e) mine[(16 * side + r + 8 * (e >> 1)) * kColumns + 8 * q + 2 * c + (e & 1)] = acc[side][q][e];
        team_sync();
        const float *parts = m.sums + half * kSumFloats + team * t.warps_k * kRows * kColumns;
        const int in = lane & 15, local = group * t.out_rows + 16 * team + in, row = p.first_row + local;
        if (local < p.n_rows)
            for (int n = 2 * wk + (lane >> 4); n < item.count; n += 2 * t.warps_k) {
                float v[2] = {};
                for (int k = 0; k < t.warps_k; ++k)
#pragma unroll
                    for (int side = 0; side < kSides; ++side) v[side] += parts[(k * kRows + 16 * side + in) * kColumns + n];
                const int64_t at = (item.first + n) * p.out_stride + local;
                float y = finish(p.w[0], matrix[0], whole[0] * m.row_factors[n], item.expert, row, v[0]);
                if constexpr (kSides == 2) y = gated(p, y, finish(p.w[1], matrix[1], whole[1] * m.row_factors[n], item.expert, row, v[1]));
                store_from_f32(p.out, at, p.out_format, y);
            }
        half ^= 1;  // a warp writes there again when all of its team have told the next sums
        if (t.warps_k == 1) __syncwarp();
        ++done_here;
        if (kSides == 2 && (is_last || task + 1 == t.end)) {
            __syncwarp();
            if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(done + index), "r"(done_here) : "memory");
            done_here = 0;
        }
        is_new = is_last;
        if (is_last) {
            group = 0;
            ++index;
            item = next;
        } else {
            ++group;
        }
        factors[0] = next_factors[0];
        factors[1] = next_factors[1];
    }
}
#endif

// Grid: multiprocessors. Shared: the ring, x [kTiles * 8 rows], sums of the warps twice.
template <bool kFp8, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) expert_few_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t full[kMostStages], empty[kMostStages];
    __shared__ float row_factors[8 * kTiles];
    Memory m = {dynamic + (-shared_address(dynamic) & 1023), nullptr, nullptr, row_factors, full, empty};
    m.xs = m.ring + a.shape.n_stages * kStageBytes;
    m.sums = reinterpret_cast<float *>(m.xs + 8 * kTiles * max(a.shape.x_row_bytes[0], a.shape.x_row_bytes[1]));
    if (threadIdx.x < a.shape.n_stages) {
        barrier_init(full + threadIdx.x, 1);
        barrier_init(empty + threadIdx.x, kWarps);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_dependence();
    release_dependents();
    const int n_items = *a.p[0].n_items;
    const Tasks first(a.p[0], a.shape.warps_k[0], n_items), second(a.p[1], a.shape.warps_k[1], n_items);
    Turn turn(a.shape.n_stages);
    if (threadIdx.x >= 32 * kWarps) {
        if (threadIdx.x > 32 * kWarps) return;
        ask_all<2>(a.p[0], first, maps.w, shared_address(m.ring), full, empty, turn);
        ask_all<1>(a.p[1], second, maps.w + 2, shared_address(m.ring), full, empty, turn);
        return;
    }
    make_all<kFp8, kTiles, 2>(a.p[0], first, a.shape.x_row_bytes[0], m, turn, a.done, 0);
    make_all<kFp8, kTiles, 1>(a.p[1], second, a.shape.x_row_bytes[1], m, turn, a.done, first.n_groups * kWarps);
#endif
}

Shape shape_of(const ExpertProduct &p, const ExpertProduct &d, bool is_fp8, int32_t item_pairs) {
    Shape s = {};
    const int64_t elements = is_fp8 ? 128 : 64, tiles = item_pairs > 8 ? 2 : 1;
    int64_t widest = 0;
    for (int i = 0; i < 2; ++i) {
        // Two stages of each side a task, four of `down`: some 64 KB.
        const int32_t n_units = (i ? d : p).n_units;
        s.warps_k[i] = 8;
        while (s.warps_k[i] > 1 && n_units < s.warps_k[i] * (i ? 4 : 2)) s.warps_k[i] /= 2;
        s.x_row_bytes[i] = static_cast<int32_t>(n_units * elements * 2 + 64);
        widest = std::max<int64_t>(widest, s.x_row_bytes[i]);
    }
    const int64_t rest = 8 * tiles * widest + 2 * kWarps * 32 * (8 * tiles + 1) * 4 + 1024;
    s.n_stages = static_cast<int32_t>(std::min<int64_t>(kMostStages, (kMostShared - rest) / kStageBytes));
    s.bytes = rest + s.n_stages * kStageBytes;
    return s;
}

int32_t map_of(const Launch &l, CUtensorMap *map, const ExpertWeight &w, int32_t warps_k, int32_t n_places) {
    const cuuint64_t size[4] = {128, static_cast<cuuint64_t>(w.rows), static_cast<cuuint64_t>(w.row_bytes / 128), static_cast<cuuint64_t>(n_places)};
    const cuuint64_t stride[3] = {static_cast<cuuint64_t>(w.row_bytes), 128, static_cast<cuuint64_t>(n_places > 1 ? w.stride : w.row_bytes)};
    const cuuint32_t box[4] = {128, static_cast<cuuint32_t>(128 / warps_k), static_cast<cuuint32_t>(warps_k), 1}, step[4] = {1, 1, 1, 1};
    const CUresult e = l.ctx->driver.encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<uint8_t *>(w.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return e == CUDA_SUCCESS ? PK_OK : fail(PK_DEVICE, "experts: tensor map of %d rows of %lld bytes: CUDA driver error %d", w.rows, (long long)w.row_bytes, static_cast<int>(e));
}

}  // namespace

bool fits_expert_few(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, int32_t format, int32_t item_pairs) {
    const bool is_fp8 = format == PK_FP8_E4M3;
    if (!has_wgmma(l.ctx) || (!is_fp8 && format != PK_BF16) || p.n_w != 2 || !p.is_wide || !d.is_wide || item_pairs > 16) return false;
    return std::max(p.n_units, d.n_units) <= 256 && p.padded_out <= p.n_rows && shape_of(p, d, is_fp8, item_pairs).n_stages >= kLeastStages;
}

int32_t launch_expert_few(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, int32_t *done, int32_t format, int32_t item_pairs, int32_t n_places) {
    const bool is_fp8 = format == PK_FP8_E4M3;
    const Arguments a = {{p, d}, done, shape_of(p, d, is_fp8, item_pairs)};
    Maps maps;
    for (int i = 0; i < 3; ++i)
        if (int32_t e = map_of(l, &maps.w[i], i < 2 ? p.w[i] : d.w[0], a.shape.warps_k[i / 2], n_places)) return e;
    auto run = [&](void (*kernel)(Maps, Arguments)) { return launch(l, "expert_few", kernel, dim3(l.ctx->n_processors), dim3(kThreads), a.shape.bytes, maps, a); };
    if (item_pairs > 8) return run(is_fp8 ? expert_few_kernel<true, 2> : expert_few_kernel<false, 2>);
    return run(is_fp8 ? expert_few_kernel<true, 1> : expert_few_kernel<false, 1>);
}

}  // namespace pk
