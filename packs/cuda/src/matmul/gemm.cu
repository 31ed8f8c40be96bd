// Tiled matmul with mma.sync: y[rows, N] = x[rows, K] W^T, bf16 x bf16, (sm_89, sm_120) e4m3 x e4m3 or (sm_120) e2m1 x e2m1 with
// scales of blocks -> f32, for more than 64 rows.
//
// Block: 128 rows x 128 columns, 8 warps of 64 x 32, four cp.async stages of 64 bytes of K. Columns come from up to
// three weights; with an activation the groups of eight columns alternate between gate and up, so that a thread holds
// both. FP8: what 128 of K add up to is added with its scales (x: per row and 128 of K; W: per 128 x 128). FP4: a stage is
// 128 of K of one of the terms of x, and its scales; W's is copied once a term. A fragment of 16 x 32 bytes lies in the same
// registers for all kinds, so they differ in the instruction alone. Assumes K a multiple
// of 8 and 16-byte rows (FP8: x and W padded with zeros to 128 of K); columns of W beyond its K must not exist (K is the
// padded width of W, x is read as zero beyond its own). Does not handle: fewer rows than min_rows (the streaming kernel does).
#include "../../include/gemm.cuh"

#include "../../include/device.cuh"
#include "../../include/fp4.cuh"

namespace pk {
namespace {

#if defined(PK_FP8_MMA)
constexpr bool kFp8Built = true;
#else
constexpr bool kFp8Built = false;
#endif
constexpr int kM = 128, kN = 128, kBytes = 64, kStages = 4, kThreads = 256;  // kBytes: of K, a stage

// What the operands are: BF16, FP8_E4M3, MXFP4 or NVFP4.
template <int kFormat>
struct Kind {
    static constexpr bool kFp8 = kFormat == PK_FP8_E4M3, kFp4 = kFormat == PK_MXFP4 || kFormat == PK_NVFP4;
    static constexpr int kScaleBytes = kFp4 ? Fp4<kFormat>::kScaleBytes : 0;  // a row and stage
    static constexpr int kStageBytes = (kM + kN) * (kBytes + kScaleBytes);
};

__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }

// d[16,8] += a[16,32] b[32,8], e4m3 operands.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(PK_FP8_MMA)
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

template <int kFormat>
__global__ void __launch_bounds__(kThreads, kFormat == PK_BF16 ? 2 : 1) gemm_mma_kernel(const __grid_constant__ GemmArguments a) {
    constexpr bool kFp8 = Kind<kFormat>::kFp8, kFp4 = Kind<kFormat>::kFp4;
    constexpr int kStageBytes = Kind<kFormat>::kStageBytes, kScaleBytes = Kind<kFormat>::kScaleBytes;
    extern __shared__ __align__(128) uint8_t shared[];
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol), m0 = blockIdx.x * kM;
    if (n_rows < a.min_rows || m0 >= n_rows) return;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int tile = blockIdx.y;
    int i = 0;
    if (!gated) i = a.n_w > 2 && tile >= a.w[2].first_tile ? 2 : a.n_w > 1 && tile >= a.w[1].first_tile ? 1 : 0;
    const int n0 = (tile - a.w[i].first_tile) * (gated ? kN / 2 : kN);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wm = warp & 1, wn = warp >> 1;
    const uint32_t base = shared_address(shared);

    // Each thread copies two 16-byte pieces of x and two of W a stage: rows tid / 4 and + 64, piece tid % 4.
    const int row = tid >> 2, chunk = tid & 3;
    const uint8_t *xp[2], *wp[2];
    bool x_ok[2], w_ok[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int m = m0 + row + 64 * h, j = row + 64 * h;
        x_ok[h] = m < n_rows;
        xp[h] = static_cast<const uint8_t *>(a.x) + static_cast<int64_t>(x_ok[h] ? m : 0) * a.x_row_bytes;
        const GemmWeight &w = a.w[gated ? (j >> 3) & 1 : i];
        int n = n0 + (gated ? (j >> 4) * 8 + (j & 7) : j);
        w_ok[h] = n < w.rows;
        wp[h] = static_cast<const uint8_t *>(w.data) + static_cast<int64_t>(w_ok[h] ? n : 0) * w.row_bytes;
    }
    // Of x (FP4: of both terms; W has half of it).
    const int k_bytes = kFp8 || kFp4 ? (a.k + 127) / 128 * 128 : a.k * 2, n_steps = (k_bytes + kBytes - 1) / kBytes;
    static_assert(!kFp4 || kTerms * 64 == 128);
    // FP4: each thread copies the scales of a row of x or W, which stand behind its codes.
    const uint8_t *scales = nullptr;
    bool scales_ok = false;
    if constexpr (kFp4) {
        const int r = tid & 127;
        if (tid < kM) {
            scales_ok = m0 + r < n_rows;
            scales = static_cast<const uint8_t *>(a.x) + static_cast<int64_t>(scales_ok ? m0 + r : 0) * a.x_row_bytes + k_bytes;
        } else {
            const GemmWeight &w = a.w[gated ? (r >> 3) & 1 : i];
            const int n = n0 + (gated ? (r >> 4) * 8 + (r & 7) : r);
            scales_ok = n < w.rows;
            scales = static_cast<const uint8_t *>(w.data) + static_cast<int64_t>(scales_ok ? n : 0) * w.row_bytes + k_bytes / 2;
        }
    }
    auto copy_stage = [&](int step) {
        if (step < n_steps) {
            uint32_t at = base + (step % kStages) * kStageBytes;
            int k = step * kBytes + chunk * 16, wk = kFp4 ? step / kTerms * kBytes + chunk * 16 : k;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                bool in = k < k_bytes;
                copy16_async(at + tile_offset(row + 64 * h, chunk), xp[h] + (in ? k : 0), in && x_ok[h]);
                copy16_async(at + kM * kBytes + tile_offset(row + 64 * h, chunk), wp[h] + (in ? wk : 0), in && w_ok[h]);
            }
            if constexpr (kFp4) copy_async<kScaleBytes>(at + (kM + kN) * kBytes + tid * kScaleBytes, scales + (tid < kM ? step : step / kTerms) * kScaleBytes, scales_ok);
        }
        commit_async();
    };
    float acc[4][4][4] = {};
    // FP8: what earlier groups of 128 of K came to, and the scales of the present one: eight rows of x, gate's and up's of W.
    float sum[kFp8 ? 4 : 1][4][4] = {}, xs[4][2], ws[2];
    auto load_scales = [&](int group) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) xs[m][h] = a.x_scale[group * a.x_scale_stride + min(m0 + wm * 64 + m * 16 + (lane >> 2) + 8 * h, n_rows - 1)];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const GemmWeight &w = a.w[gated ? side : i];
            ws[side] = w.block_scale != nullptr ? w.block_scale[n0 / 128 * w.block_stride + group] : 1.0f;
        }
    };
    for (int s = 0; s < kStages - 1; ++s) copy_stage(s);
    for (int step = 0; step < n_steps; ++step) {
        wait_async<kStages - 2>();
        __syncthreads();
        copy_stage(step + kStages - 1);
        const uint32_t at = base + (step % kStages) * kStageBytes, bt = at + kM * kBytes;
        if constexpr (kFp8)
            if ((step & 1) == 0) load_scales(step / 2);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint32_t x[4][4], w[2][4];
#pragma unroll
            for (int m = 0; m < 4; ++m) load_matrix4(x[m], at + tile_offset(wm * 64 + m * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int n = 0; n < 2; ++n) load_matrix4(w[n], bt + tile_offset(wn * 32 + n * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
            // FP4: the scales of this half of the stage; of x those of the row that this lane answers for.
            uint32_t x_scales[4], w_scales[4];
            if constexpr (kFp4) {
                auto word = [&](int r) {
                    const uint8_t *p = shared + (step % kStages) * kStageBytes + (kM + kN) * kBytes + r * kScaleBytes;
                    return kFormat == PK_MXFP4 ? *reinterpret_cast<const uint32_t *>(p) >> (16 * k) : *reinterpret_cast<const uint32_t *>(p + 4 * k);
                };
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    x_scales[m] = word(wm * 64 + m * 16 + 8 * (lane & 1) + (lane >> 2));
                    w_scales[m] = word(kM + wn * 32 + m * 8 + (lane >> 2));
                }
            }
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const uint32_t b0 = w[n >> 1][(n & 1) * 2], b1 = w[n >> 1][(n & 1) * 2 + 1];
                    if constexpr (kFp8) mma_e4m3(acc[m][n], x[m], b0, b1);
                    else if constexpr (kFp4) mma_e2m1<kFormat>(acc[m][n], x[m], b0, b1, x_scales[m], w_scales[n]);
                    else mma_bf16(acc[m][n], x[m][0], x[m][1], x[m][2], x[m][3], b0, b1);
                }
        }
        if constexpr (kFp8)
            if (step & 1) {
#pragma unroll
                for (int m = 0; m < 4; ++m)
#pragma unroll
                    for (int n = 0; n < 4; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            sum[m][n][e] = fmaf(acc[m][n][e], xs[m][e >> 1] * (gated && (n & 1) ? ws[1] : ws[0]), sum[m][n][e]);
                            acc[m][n][e] = 0.0f;
                        }
            }
    }
    if constexpr (kFp8) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[m][n][e] = sum[m][n][e];
    }
    if constexpr (kFp4) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float factor = a.x_scale[min(m0 + wm * 64 + m * 16 + (lane >> 2) + 8 * (e >> 1), n_rows - 1)];
#pragma unroll
                for (int n = 0; n < 4; ++n) acc[m][n][e] *= factor;
            }
    }
    auto finish = [&](const GemmWeight &w, int n, float v) {
        v *= w.scale;
        if (w.row_scale != nullptr) v *= w.row_scale[n];
        return w.bias != nullptr ? v + w.bias[n] : v;
    };
    auto store = [&](const GemmWeight &w, int m, int n, float v) {
        v *= a.scale;
        if (a.softcap > 0.0f) v = a.softcap * tanhf(v / a.softcap);
        int64_t column = w.first_column + n;
        if (a.add != nullptr) {
            const float old = load_as_f32(a.add, m * a.add_stride + column, a.add_format);
            v = a.act != PK_ACT_NONE && !gated ? activate(old, a.act) * v : v + old;
        }
        store_from_f32(a.y, m * a.y_stride + column, a.y_format, v);
    };
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int r = m0 + wm * 64 + m * 16 + (lane >> 2) + 8 * (e >> 1);
                int c = wn * 32 + n * 8 + 2 * (lane & 3) + (e & 1);
                if (r >= n_rows) continue;
                if (gated) {
                    int column = n0 + (c >> 4) * 8 + (c & 7);
                    if ((n & 1) == 0 && column < a.w[0].rows) {
                        float gate = finish(a.w[0], column, acc[m][n][e]), up = finish(a.w[1], column, acc[m][n | 1][e]);
                        store(a.w[0], r, column, activate(gate, a.act) * up);
                    }
                } else if (n0 + c < a.w[i].rows) {
                    store(a.w[i], r, n0 + c, finish(a.w[i], n0 + c, acc[m][n][e]));
                }
            }
}

}  // namespace

bool has_fp8_mma() { return kFp8Built; }
bool has_fp4_mma(const pk_ctx *ctx) { return kFp4Built && ctx->tries; }

int32_t launch_gemm_mma(const Launch &l, GemmArguments a, int64_t max_rows) {
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    int32_t tiles = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) {
        a.w[i].first_tile = tiles;
        tiles += (a.w[i].rows + (gated ? kN / 2 : kN) - 1) / (gated ? kN / 2 : kN);
    }
    a.w[1].first_tile = gated ? 0 : a.w[1].first_tile;
    a.n_tiles = tiles;
    const dim3 grid(static_cast<unsigned>((max_rows + kM - 1) / kM), static_cast<unsigned>(tiles));
    auto start = [&](auto kernel, int64_t stage_bytes) { return launch(l, "gemm_mma", kernel, grid, dim3(kThreads), kStages * stage_bytes, a); };
    if constexpr (kFp4Built) {
        if (a.fp4 == PK_MXFP4) return start(gemm_mma_kernel<PK_MXFP4>, Kind<PK_MXFP4>::kStageBytes);
        if (a.fp4 == PK_NVFP4) return start(gemm_mma_kernel<PK_NVFP4>, Kind<PK_NVFP4>::kStageBytes);
    }
    if constexpr (kFp8Built)
        if (a.x_scale != nullptr) return start(gemm_mma_kernel<PK_FP8_E4M3>, Kind<PK_FP8_E4M3>::kStageBytes);
    return start(gemm_mma_kernel<PK_BF16>, Kind<PK_BF16>::kStageBytes);
}

}  // namespace pk
