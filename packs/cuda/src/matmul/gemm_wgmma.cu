// Tiled matmul on Hopper: y[rows, N] = x[rows, K] W^T with TMA, an mbarrier ring and wgmma, for more than 64 rows.
//
// Block: one producer thread that copies boxes, two consumer warpgroups; persistent over tiles, grouped so that concurrent
// blocks share boxes in L2. Tiles that do not fill the device once are cut along K (stream-K): every block gets one run of
// their steps, parts of tiles go through memory and are added by all the blocks that have one. BF16: 128 x 256 tiles, 64 of K
// a stage, 64 rows a warpgroup. FP8: 256 x 128 tiles (few rows: 128 x 256), 128 of K a stage, a warpgroup multiplies 64 x 128
// twice; what 128 of K add up to is added with its scales (x: per row and 128 of K; W: per 128 x 128), so that the tensor
// core's short accumulator never sums more than 128 products; the warpgroups take turns, so that one multiplies while the
// other adds. With an activation the first half of a tile is gate, the second up. Weights are asked for before the kernels
// ahead are done, where the bound of rows tells the tiles. Assumes swizzled 128-byte boxes (K padded to whole boxes) and, where
// tiles are cut, blocks that all run at once. Does not handle: fewer rows than min_rows.
#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kConsumers = 256, kOutBytes = 8 * 16 * kStorePitch * 4;
// Steps of K that splitting the last tiles must save: laying parts down and adding them up takes about 20 us, behind whole tiles more.
constexpr int split_cost(bool is_fp8, bool has_whole) { return is_fp8 ? 20 : has_whole ? 40 : 32; }
constexpr int kPlannedRows = 512;  // bound of rows up to which tiles are cut, and dealt out by the bound
// Tiles of rows of x by rows of W: BF16 128 x 256; FP8 256 x 128, and 128 x 256 for few rows.
enum Tiling { kBf16, kTall, kWide };
template <int kTiling> constexpr bool kFp8 = kTiling != kBf16;
template <int kTiling> constexpr int kM = kTiling == kTall ? 256 : 128;
template <int kTiling> constexpr int kGroupM = 2048 / kM<kTiling>;  // tiles of x that go through W together
template <int kTiling> constexpr int kN = kTiling == kTall ? 128 : 256;
constexpr int kRing = 4, kStageBytes = 384 * 128;
template <int kTiling> constexpr int kScaleBytes = kFp8<kTiling> ? kM<kTiling> * 4 : 0;  // of a stage: one per row of x
template <int kTiling> constexpr int kSharedBytes = kRing * (kStageBytes + kScaleBytes<kTiling>) + 1024 + kOutBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ int load_acquire(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(int *p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ float shared_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// A tile (or column of tiles) that several blocks (groups of them) share, the first of them and how many; no parts: none is shared.
struct Shared {
    int tile, owner, n_parts;
};

// How the steps of the first n_tiles tiles are dealt out: a run a block (or group), as equal as can be (stream-K, Osama et al. 2023).
struct Runs {
    uint32_t total, n_work;
    int n_steps;
    __device__ __forceinline__ Runs(int n_tiles, int n_steps, int n_blocks) : total(n_tiles * n_steps), n_work(min(static_cast<uint32_t>(n_blocks), total)), n_steps(n_steps) {}
    __device__ __forceinline__ int first_of(int block) const { return static_cast<int>(block < n_work ? total * block / n_work : total); }
    // The first tile (0) or the last (1) of block `me`.
    __device__ __forceinline__ Shared shared(int me, int which) const {
        const int begin = first_of(me), end = first_of(me + 1);
        const int tile = (which == 0 ? begin : end - 1) / n_steps, first = tile * n_steps, last = first + n_steps;
        if (begin >= end || (begin <= first && end >= last) || (which == 1 && tile == begin / n_steps)) return {0, 0, 0};
        int owner = static_cast<int>(static_cast<uint32_t>(first) * n_work / total), n = 1;
        while (first_of(owner + 1) <= first) ++owner;
        while (first_of(owner) > first) --owner;
        while (owner + n < static_cast<int>(n_work) && first_of(owner + n) < last) ++n;
        return {tile, owner, n};
    }
};
#endif

template <int kTiling>
__global__ void __launch_bounds__(kThreads, 1) gemm_wgmma_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool kIsFp8 = kFp8<kTiling>;
    constexpr int kTileN = kN<kTiling>, kRows = kM<kTiling>, kBytes = kStageBytes, kBoxK = kIsFp8 ? 128 : 64, kHalf = kTileN / 2;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kBytes);
    float *out_tile = scale_ring + kRing * kScaleBytes<kTiling> / 4;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int n_blocks = gridDim.x, me = blockIdx.x, n_steps = (a.k + kBoxK - 1) / kBoxK;
    // What is needed once a tile stays in shared memory: registers are for sums.
    __shared__ volatile int plan_rows, plan_columns, plan_height, plan_split, plan_end, true_rows;
    // BF16: blocks work in groups of as many as there are tiles of rows, where those are few: a column of tiles each, in step, so
    // that they share boxes of W. Columns that do not fill the device once are cut along K: every group gets one run of their steps.
    constexpr bool kInStep = !kIsFp8;  // FP8 has half as many tiles of rows, and gains less than the divisions take
    auto height_of = [&] { return kInStep ? plan_height : 1; };
    auto plan = [&](int n_rows) {
        const int m_tiles = (n_rows + kRows - 1) / kRows, height = kInStep && a.partial != nullptr && m_tiles > 0 && m_tiles <= 4 ? m_tiles : 1;
        const int n_columns = m_tiles * a.n_tiles / height, n_groups = n_blocks / height, last_wave = n_columns % n_groups;
        const int n_split = a.partial != nullptr && last_wave > 0 && (n_groups - last_wave) * n_steps > split_cost(kIsFp8, n_columns > n_groups) * n_groups ? last_wave : 0;
        plan_rows = n_rows;
        plan_height = height;
        plan_columns = n_columns;
        plan_split = n_split;
        plan_end = me / height < n_groups ? Runs(n_split, n_steps, n_groups).first_of(me / height + 1) : 0;
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (a.planned_rows > 0) plan(a.planned_rows);
    }
    if (a.planned_rows == 0) {
        wait_dependence();
        const int n_rows = rows_of(a.info, a.rows_symbol);
        if (n_rows < a.min_rows) return;
        if (threadIdx.x == 0) plan(n_rows);
    }
    __syncthreads();
    release_dependents();
    auto tile_of = [&](int index) { return gemm_tile<kRows, kTileN, kGroupM<kTiling>>(a, index, (plan_rows + kRows - 1) / kRows, gated); };
    const int n_groups = n_blocks / height_of(), my_group = me / height_of();
    int at = Runs(plan_split, n_steps, n_groups).first_of(my_group), next_whole = my_group < n_groups ? plan_split + my_group : plan_columns;
    // The next run: steps k0 to k1 of a tile.
    auto next_run = [&](int &index, int &k0, int &k1) {
        const int end = plan_end, height = height_of(), row = me % height;
        if (at < end) {
            const int column = at / n_steps;
            index = column * height + row;
            k0 = at - column * n_steps;
            k1 = min(n_steps, k0 + end - at);
            at += k1 - k0;
            return true;
        }
        const int column = next_whole;
        index = column * height + row;
        k0 = 0;
        k1 = n_steps;
        next_whole += n_blocks / height;
        return column < plan_columns;
    };
    const int group = threadIdx.x >> 7;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            auto copy_weights = [&](const GemmTile &t, int k, int stage) {
                barrier_expect(full + stage, kBytes + kScaleBytes<kTiling>);
                const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
                uint8_t *to = ring + stage * kBytes;
                copy_box(to + kRows * 128, first, k * kBoxK, t.n0, full + stage);
                copy_box(to + (kRows + kHalf) * 128, second, k * kBoxK, gated ? t.n0 : t.n0 + kHalf, full + stage);
            };
            // Weights do not depend on the kernels before: where the tiles are known the ring begins to fill while those still run.
            int n_ahead = 0;
            if (a.planned_rows > 0) {
                const int kept_at = at, kept_whole = next_whole;
                int index, k0, k1;
                if (next_run(index, k0, k1)) {
                    n_ahead = min(kRing, k1 - k0);
                    const GemmTile t = tile_of(index);
                    for (int i = 0; i < n_ahead; ++i) copy_weights(t, k0 + i, i);
                }
                at = kept_at;
                next_whole = kept_whole;
                wait_dependence();
            }
            for (int index, k0, k1; next_run(index, k0, k1);) {
                const GemmTile t = tile_of(index);
                for (int k = k0; k < k1; ++k) {
                    if (--n_ahead < 0) {
                        barrier_wait(empty + stage, phase ^ 1);
                        copy_weights(t, k, stage);
                    }
                    if constexpr (kIsFp8) copy_bytes(shared_address(scale_ring + stage * kRows), a.x_scale + k * a.x_scale_stride + t.m0, kScaleBytes<kTiling>, full + stage);
                    copy_box(ring + stage * kBytes, &maps.x, k * kBoxK, t.m0, full + stage);
                    advance();
                }
            }
        }
    } else {
    more_registers<232>();
    if (a.planned_rows > 0) wait_dependence();
    if (threadIdx.x == 128) true_rows = rows_of(a.info, a.rows_symbol);
    consumers_sync();
    // Turns of the two warpgroups, of FP8.
    auto my_turn = [](int wg) { asm volatile("bar.sync %0, 256;" ::"r"(2 + wg) : "memory"); };
    auto your_turn = [](int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - wg) : "memory"); };
    const int wg = group - 1, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    if (kIsFp8 && wg == 1) your_turn(wg);
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * (kRows / 2) * 128);
    const uint32_t scales_first = shared_address(scale_ring) + 4 * (wg * (kRows / 2) + warp * 16 + (lane >> 2));
    for (int index, k0, k1; next_run(index, k0, k1);) {
        const GemmTile t = tile_of(index);
        float acc[128];  // FP8: two halves of 64 x 128, of rows or of columns
        if constexpr (kIsFp8) {
            float part[64];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
            const bool two_scales = gated || kTiling == kWide;
            const GemmWeight &w0 = a.w[t.weight], &w1 = a.w[gated ? 1 : t.weight];
            const int n1 = gated || kTiling == kTall ? t.n0 : min(t.n0 + 128, w1.rows - 1);
            const float *s0 = w0.block_scale ? w0.block_scale + (t.n0 >> 7) * w0.block_stride : nullptr;
            const float *s1 = w1.block_scale ? w1.block_scale + (n1 >> 7) * w1.block_stride : nullptr;
            // A lane keeps the weights' scales of stage 32 i + lane, and the next ones; read by shuffles, they are there in time.
            auto scales_of = [&](const float *s, int k) { return s == nullptr ? 1.0f : k + lane < n_steps ? __ldg(s + k + lane) : 0.0f; };
            float w_now[2] = {}, w_next[2] = {scales_of(s0, k0 & ~31), two_scales ? scales_of(s1, k0 & ~31) : 0.0f};
            // Descriptors differ in the low word only.
            uint32_t x_low, w_low;
            auto await_stage = [&] {
                barrier_wait(full + stage, phase);
                x_low = __shfl_sync(~0u, x_first + stage * (kBytes / 16), 0);
                w_low = __shfl_sync(~0u, w_first + stage * (kBytes / 16), 0);
            };
            await_stage();
            for (int k = k0; k < k1; ++k) {
                float xs[2][2], ws0, ws1;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t x_half = x_low + (kTiling == kTall ? 512 * half : 0), w_half = w_low + (kTiling == kTall ? 0 : 1024 * half);
                    // One warpgroup's products run while the other adds.
                    my_turn(wg);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, (uint64_t{0x40000040} << 32) | (x_half + 2 * i), (uint64_t{0x40000040} << 32) | (w_half + 2 * i), i > 0);
                    wgmma_commit();
                    your_turn(wg);
                    // While they run: the scales of this stage, then the next stage.
                    const int used = stage;
                    if (half == 0) {
                        if (k == k0 || (k & 31) == 0) {
                            w_now[0] = w_next[0];
                            w_now[1] = w_next[1];
                            w_next[0] = scales_of(s0, (k & ~31) + 32);
                            if (two_scales) w_next[1] = scales_of(s1, (k & ~31) + 32);
                        }
                        ws0 = __shfl_sync(~0u, w_now[0], k & 31);
                        ws1 = two_scales ? __shfl_sync(~0u, w_now[1], k & 31) : ws0;
                        const uint32_t scales = scales_first + stage * kRows * 4;
#pragma unroll
                        for (int i = 0; i < (kTiling == kTall ? 2 : 1); ++i) {
                            xs[i][0] = shared_float(scales + 256 * i);
                            xs[i][1] = shared_float(scales + 256 * i + 32);
                        }
                    } else {
                        advance();
                        if (k + 1 < k1) await_stage();
                    }
                    wgmma_wait<0>();
#pragma unroll
                    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
                    if (half == 1) release(used);
                    const int x_at = kTiling == kTall ? half : 0;
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        const float w = (kTiling == kTall ? j < 8 : half == 0) ? ws0 : ws1, f0 = xs[x_at][0] * w, f1 = xs[x_at][1] * w;
                        float *sum = acc + 64 * half + 4 * j;
                        sum[0] = fmaf(f0, part[4 * j], sum[0]);
                        sum[1] = fmaf(f0, part[4 * j + 1], sum[1]);
                        sum[2] = fmaf(f1, part[4 * j + 2], sum[2]);
                        sum[3] = fmaf(f1, part[4 * j + 3], sum[3]);
                    }
                }
            }
        } else {
            int previous = -1;
            for (int k = k0; k < k1; ++k) {
                barrier_wait(full + stage, phase);
                // The same for all lanes, which the compiler learns from the shuffle: half the moves to uniform registers.
                const uint32_t x_low = __shfl_sync(~0u, x_first + stage * (kBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + stage * (kBytes / 16), 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) wgmma_bf16_n256(acc, (uint64_t{0x40000040} << 32) | (x_low + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 2 * i), k > k0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = stage;
                advance();
            }
            wgmma_wait<0>();
            release(previous);
        }
        if (k1 - k0 < n_steps) {
            // A part of a tile: laid down for whoever adds it up.
            const int thread = fresh_thread();
            float4 *to = reinterpret_cast<float4 *>(a.partial + (2 * me + (k0 == 0)) * kPartFloats) + (thread / 32 - 4) * 1024 + (thread & 31);
#pragma unroll
            for (int j = 0; j < 32; ++j) __stcg(to + j * 32, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
            consumers_sync();
            if (threadIdx.x == 128) store_release(a.flags + 2 * kMaxBlocks + 2 * me + (k0 == 0), __ldcg(a.flags + me) + 1);
            continue;
        }
        const int warp8 = fresh_thread() / 32 - 4, m_first = t.m0 + (warp8 >> 2) * (kRows / 2) + (warp8 & 3) * 16;
        if constexpr (kTiling == kTall) {
#pragma unroll
            for (int half = 0; half < 2; ++half) store_sums<128>(a, t.weight, gated, t.n0, m_first + 64 * half, true_rows, Half{acc, 64 * half}, out_tile);
        } else {
            store_sums<256>(a, t.weight, gated, t.n0, m_first, true_rows, acc, out_tile);
        }
    }
    if (kIsFp8 && wg == 0) my_turn(wg);
    if (plan_split == 0) return;
    const int n_rows = true_rows, now = __ldcg(a.flags + me) + 1;  // the number of the launch
    const int height = height_of(), row = me % height;
    const Runs runs(plan_split, n_steps, n_blocks / height);
    // The blocks of a cut tile deal its pieces of 16 rows and 64 columns (gated: 32 of gate and of up) among their warps.
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const Shared cut = runs.shared(me / height, which);
        if (cut.n_parts == 0) continue;
        const int n_parts = cut.n_parts, owner = cut.owner;  // of groups
        for (int i = threadIdx.x - 128; i < n_parts; i += kConsumers)
            while (load_acquire(a.flags + 2 * kMaxBlocks + 2 * ((owner + i) * height + row) + (i == 0)) != now) {}
        consumers_sync();
        const GemmTile t = tile_of(cut.tile * height + row);
        for (int piece = wg * 4 + warp + (me / height - owner) * 8; piece < 32; piece += n_parts * 8) {
            const int from_warp = piece & 7, quarter = piece >> 3, half = kTiling == kTall ? quarter >> 1 : 0, in = kTiling == kTall ? quarter & 1 : quarter;
            const int m_first = t.m0 + (from_warp >> 2) * (kRows / 2) + 64 * half + (from_warp & 3) * 16;
            if (m_first >= n_rows) continue;
            const int first = half * (kTileN / 8) + in * (gated ? 4 : 8), jump = gated ? kTileN / 16 - 4 : 0;
            float sum[32] = {};
#pragma unroll 2
            for (int part = 0; part < n_parts; ++part) {
                const float4 *from = reinterpret_cast<const float4 *>(a.partial + (2 * ((owner + part) * height + row) + (part == 0)) * kPartFloats) + from_warp * 1024 + first * 32 + lane;
                float4 v[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = __ldcg(from + (j < 4 ? j : j + jump) * 32);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    sum[4 * j] += v[j].x; sum[4 * j + 1] += v[j].y; sum[4 * j + 2] += v[j].z; sum[4 * j + 3] += v[j].w;
                }
            }
            store_sums<64>(a, t.weight, gated, t.n0 + in * (gated ? 32 : 64), m_first, n_rows, sum, out_tile);
        }
    }
    // Every block counts the launches that cut tiles; they all have the same blocks.
    consumers_sync();
    if (threadIdx.x == 128) a.flags[me] = now;
    }
#endif
}

template <int kTiling>
int32_t launch_tiles(const Launch &l, GemmArguments a, int64_t max_rows, int64_t x_cols) {
    GemmMaps maps;
    if (int32_t e = gemm_maps<kM<kTiling>, kN<kTiling>>(l, &maps, a, max_rows, x_cols, kFp8<kTiling>)) return e;
    // Of many rows each block of a cut tile would be elsewhere in K, so that boxes of W and x met in L2 no longer.
    if (l.ctx->n_processors > kMaxBlocks || max_rows > kPlannedRows) a.partial = nullptr;
    // Few tiles of rows: cut by the bound, which is known before the kernels ahead are done. Rows past the true ones are not stored.
    if (a.min_rows == 0 && max_rows <= kPlannedRows && !a.are_unpacked) a.planned_rows = static_cast<int32_t>(max_rows);
    const int64_t all = (max_rows + kM<kTiling> - 1) / kM<kTiling> * a.n_tiles;
    const unsigned blocks = static_cast<unsigned>(all < l.ctx->n_processors && a.partial == nullptr ? all : l.ctx->n_processors);
    Launch own = l;
    own.overlap = l.overlap || a.planned_rows > 0 || kFp8<kTiling>;  // FP8: the blocks set themselves up while x is narrowed
    return launch(own, "gemm_wgmma", gemm_wgmma_kernel<kTiling>, dim3(blocks), dim3(kThreads), kSharedBytes<kTiling>, maps, a);
}

}  // namespace

bool has_wgmma(const pk_ctx *ctx) {
#if defined(PK_WGMMA)
    return ctx->capability == 90;
#else
    (void)ctx;
    return false;
#endif
}

int64_t gemm_partial_bytes(int32_t n_processors) { return 2 * n_processors * kPartFloats * 4; }

int32_t launch_gemm_wgmma(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (a.x_scale == nullptr) return launch_tiles<kBf16>(l, a, max_rows, a.k);
    const int64_t padded = (a.k + 127) / 128 * 128;
    // An odd number of halves of a tall tile's rows: the other form computes none in vain.
    return max_rows <= 128 || (max_rows > 256 && max_rows <= 384) ? launch_tiles<kWide>(l, a, max_rows, padded) : launch_tiles<kTall>(l, a, max_rows, padded);
}

}  // namespace pk
