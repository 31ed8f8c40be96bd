// Tiled matmul on Blackwell (sm_100, sm_103): y[rows, N] = x[rows, K] W^T in bf16 or e4m3 with TMA and tcgen05, for more than 64 rows.
// UNVALIDATED: compiled, its machine code looked at, never run; used only where pk_open was asked for such kernels.
//
// Block: one warp whose first thread copies boxes, one whose first thread issues products, the others empty the sums; persistent
// over tiles, 128 bytes of K a stage, grouped so that concurrent blocks share boxes in L2. Sums lie in tensor memory, in slots that
// are emptied while the next is multiplied into: BF16 a tile of 128 x 256 a slot; FP8 128 of K of a tile of 128 x 128, which are added
// up in registers with their scales (x: per row and 128 of K; W: per 128 x 128). With an activation the first half of a tile is gate,
// the second up. A row of a tile is a lane of tensor memory: a thread stores sixteen neighbouring columns of its row at a time.
// Assumes swizzled 128-byte boxes (K padded to whole boxes). Does not handle: fewer rows than min_rows.
#include "../../include/gemm_boxes.cuh"
#include "../../include/tcgen05.cuh"

namespace pk {

#if defined(PK_TCGEN05)
namespace {

constexpr int kM = 128, kGroupM = 16;
template <bool kFp8>
struct Form {
    static constexpr int kN = kFp8 ? 128 : 256, kRing = kFp8 ? 6 : 4, kSlots = 512 / kN, kEmptying = kFp8 ? 8 : 4, kThreads = 64 + 32 * kEmptying;
    static constexpr int kStageBytes = (kM + kN) * 128, kStep = kFp8 ? 128 : 64;  // kStep: of K, a stage
};

// Columns n0 to n0 + 15 of one row: v of `weight`, u of up where that is gate.
__device__ __forceinline__ void store16(const GemmArguments &a, int weight, bool gated, int row, int n0, float (&v)[16], const float (&u)[16]) {
    const GemmWeight &w = a.w[weight], &up = a.w[1];
    const int n_here = min(16, w.rows - n0);
    const int64_t at = row * a.y_stride + w.first_column + n0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        if (j >= n_here) break;
        const int n = n0 + j;
        float y = v[j] * w.scale * (w.row_scale ? w.row_scale[n] : 1.0f) + (w.bias ? w.bias[n] : 0.0f);
        if (gated) y = activate(y, a.act) * (u[j] * up.scale * (up.row_scale ? up.row_scale[n] : 1.0f) + (up.bias ? up.bias[n] : 0.0f));
        y *= a.scale;
        if (a.softcap > 0.0f) y = a.softcap * quick_tanh(y / a.softcap);
        if (a.add != nullptr) {
            const float old = load_as_f32(a.add, row * a.add_stride + w.first_column + n, a.add_format);
            y = a.act != PK_ACT_NONE && !gated ? activate(old, a.act) * y : y + old;
        }
        v[j] = y;
    }
    const int wide = a.y_format == PK_F32 ? 4 : 8;
    if (n_here == 16 && ((a.y_stride | (w.first_column + n0)) & (wide - 1)) == 0 && (reinterpret_cast<uintptr_t>(a.y) & 15) == 0) {
#pragma unroll
        for (int j = 0; j < 16; j += 8) {
            const float part[8] = {v[j], v[j + 1], v[j + 2], v[j + 3], v[j + 4], v[j + 5], v[j + 6], v[j + 7]};
            store8(a.y, at + j, a.y_format, part);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j)
        if (j < n_here) store_from_f32(a.y, at + j, a.y_format, v[j]);
}

template <bool kFp8>
__global__ void __launch_bounds__(Form<kFp8>::kThreads, 1) gemm_tcgen05_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(PK_TCGEN05_DEVICE)
    using F = Form<kFp8>;
    constexpr int kN = F::kN, kRing = F::kRing, kSlots = F::kSlots, kStageBytes = F::kStageBytes;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing], sums_full[kSlots], sums_empty[kSlots];
    __shared__ uint32_t tensor_memory;
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 1);
        }
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(sums_full + i, 1);
            barrier_init(sums_empty + i, F::kEmptying);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 1) tensor_memory_take(&tensor_memory);
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol);
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int m_tiles = (n_rows + kM - 1) / kM, n_all = n_rows < a.min_rows ? 0 : m_tiles * a.n_tiles, n_steps = (a.k + F::kStep - 1) / F::kStep;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    if (threadIdx.x == 0) {
        for (int index = blockIdx.x; index < n_all; index += gridDim.x) {
            const GemmTile t = gemm_tile<kM, kN, kGroupM>(a, index, m_tiles, gated);
            const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
            for (int k = 0; k < n_steps; ++k) {
                barrier_wait(empty + stage, phase ^ 1);
                barrier_expect(full + stage, kStageBytes);
                uint8_t *to = ring + stage * kStageBytes;
                copy_box(to, &maps.x, k * F::kStep, t.m0, full + stage);
                copy_box(to + kM * 128, first, k * F::kStep, t.n0, full + stage);
                copy_box(to + (kM + kN / 2) * 128, second, k * F::kStep, gated ? t.n0 : t.n0 + kN / 2, full + stage);
                advance();
            }
        }
    } else if (threadIdx.x == 32) {
        int n_slots = 0;
        for (int index = blockIdx.x; index < n_all; index += gridDim.x)
            for (int k = 0; k < n_steps; ++k) {
                const int slot = n_slots % kSlots;
                if (kFp8 || k == 0) {
                    barrier_wait(sums_empty + slot, (n_slots / kSlots & 1) ^ 1);
                    tensor_fence_after();
                }
                barrier_wait(full + stage, phase);
                tensor_fence_after();
                const uint32_t at = shared_address(ring) + stage * kStageBytes;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    tensor_mma<kFp8, kM, kN>(tensor_memory + slot * kN, tensor_descriptor(at + 32 * i), tensor_descriptor(at + kM * 128 + 32 * i), (!kFp8 && k > 0) || i > 0);
                tensor_commit(empty + stage);
                advance();
                if (kFp8 || k == n_steps - 1) {
                    tensor_commit(sums_full + slot);
                    ++n_slots;
                }
            }
    } else if (warp >= 2) {
        const int quarter = warp & 3, part = (warp - 2) >> 2;  // FP8: which half of the columns of gate and up, or of the tile
        int n_slots = 0;
        auto begin = [&] {
            const int slot = n_slots % kSlots;
            barrier_wait(sums_full + slot, n_slots / kSlots & 1);
            tensor_fence_after();
            return tensor_memory + (static_cast<uint32_t>(32 * quarter) << 16) + slot * kN;
        };
        auto end = [&] {
            tensor_fence_before();
            __syncwarp();
            if (lane == 0) barrier_arrive(sums_empty + n_slots % kSlots);
            ++n_slots;
        };
        for (int index = blockIdx.x; index < n_all; index += gridDim.x) {
            const GemmTile t = gemm_tile<kM, kN, kGroupM>(a, index, m_tiles, gated);
            const int row = t.m0 + 32 * quarter + lane;
            if constexpr (kFp8) {
                const int first = gated ? 32 * part : 64 * part, second = gated ? 64 + 32 * part : 64 * part + 32;
                const GemmWeight &w = a.w[t.weight], &up = a.w[gated ? 1 : t.weight];
                const int64_t scale_row = t.n0 / 128 * w.block_stride;
                float sums[2][32] = {};
#pragma unroll 1
                for (int k = 0; k < n_steps; ++k) {
                    const float x = a.x_scale[k * a.x_scale_stride + min(row, n_rows - 1)];
                    const float scale[2] = {w.block_scale != nullptr ? x * w.block_scale[scale_row + k] : x, up.block_scale != nullptr ? x * up.block_scale[t.n0 / 128 * up.block_stride + k] : x};
                    const uint32_t from = begin();
#pragma unroll
                    for (int c = 0; c < 32; c += 16) {
                        float v[16], u[16];
                        tensor_load16(v, from + first + c);
                        tensor_load16(u, from + second + c);
                        tensor_wait(v, u);
#pragma unroll
                        for (int j = 0; j < 16; ++j) {
                            sums[0][c + j] = fmaf(v[j], scale[0], sums[0][c + j]);
                            sums[1][c + j] = fmaf(u[j], scale[1], sums[1][c + j]);
                        }
                    }
                    end();
                }
                if (row >= n_rows) continue;
#pragma unroll
                for (int c = 0; c < 32; c += 16) {
                    float v[16], u[16];
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        v[j] = sums[0][c + j];
                        u[j] = sums[1][c + j];
                    }
                    store16(a, t.weight, gated, row, t.n0 + first + c, v, u);
                    if (!gated) store16(a, t.weight, false, row, t.n0 + second + c, u, u);
                }
            } else {
                const uint32_t from = begin();
                const int wide = gated ? kN / 2 : kN;
#pragma unroll 1
                for (int c = 0; c < wide; c += 16) {
                    float v[16], u[16];
                    tensor_load16(v, from + c);
                    tensor_load16(u, from + (gated ? kN / 2 : 0) + c);
                    tensor_wait(v, u);
                    if (row < n_rows) store16(a, t.weight, gated, row, t.n0 + c, v, u);
                }
                end();
            }
        }
    }
    __syncwarp();
    __syncthreads();
    tensor_fence_after();
    if (warp == 1) tensor_memory_give(tensor_memory);
#endif
}

template <bool kFp8>
int32_t launch_form(const Launch &l, GemmArguments a, int64_t max_rows) {
    using F = Form<kFp8>;
    GemmMaps maps;
    if (int32_t e = gemm_maps<kM, F::kN>(l, &maps, a, max_rows, kFp8 ? (a.k + 127) / 128 * 128 : a.k, kFp8)) return e;
    const int64_t all = (max_rows + kM - 1) / kM * a.n_tiles;
    const unsigned blocks = static_cast<unsigned>(all < l.ctx->n_processors ? all : l.ctx->n_processors);
    return launch(l, "gemm_tcgen05", gemm_tcgen05_kernel<kFp8>, dim3(blocks), dim3(F::kThreads), F::kRing * F::kStageBytes + 1024, maps, a);
}

}  // namespace

int32_t launch_gemm_tcgen05(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    return a.x_scale != nullptr ? launch_form<true>(l, a, max_rows) : launch_form<false>(l, a, max_rows);
}

bool has_tcgen05(const pk_ctx *ctx) { return ctx->tries && ctx->capability / 10 == 10; }
#else
int32_t launch_gemm_tcgen05(const Launch &, const GemmArguments &, int64_t) { return fail(PK_UNSUPPORTED, "gemm: this pack has no kernels for tcgen05"); }
bool has_tcgen05(const pk_ctx *) { return false; }
#endif

}  // namespace pk
