// Products of many rows with a few BF16 weights' rows: what a tile of 256 columns would mostly leave empty (gates of a delta net, of experts).
//
// y[rows, N] = x[rows, K] W^T, N up to 128 over all weights of the record, x BF16. A block has 64 rows of x and all of W: a warp asks for boxes of both,
// 64 of K a stage, a warpgroup multiplies. What limits it is x, which is read once. Shared memory: the ring. Grid: rows / 64.
#include "../../include/gemm_boxes.cuh"
#include "../../include/invariant.h"
#include "../../include/thin.cuh"

namespace pk {
namespace {

constexpr int kRows = 64, kColumns = 128, kStages = 4, kXBytes = kRows * 128, kStageBytes = kXBytes + kColumns * 128, kThinShared = kStages * kStageBytes + 1024, kThinThreads = 160;

__global__ void __launch_bounds__(kThinThreads, 2) thin_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ uint64_t full[kStages], empty[kStages];
    const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_steps = (a.k + 63) / 64, m0 = blockIdx.x * kRows;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol);
    if (m0 >= n_rows || n_rows < a.min_rows) return;
    if (warp == 4) {
        if (lane != 0) return;
        int w_rows = 0;
        for (int i = 0; i < a.n_w; ++i) w_rows += a.w[i].rows;
        for (int step = 0; step < n_steps; ++step) {
            const int at = step % kStages;
            if (step >= kStages) barrier_wait(empty + at, (step / kStages - 1) & 1);
            barrier_expect(full + at, kXBytes + w_rows * 128);
            uint32_t to = ring + at * kStageBytes;
            copy_box_at(to, &maps.x, step * 64, m0, full + at);
            to += kXBytes;
            for (int i = 0; i < a.n_w; ++i) {
                copy_box_at(to, maps.w + i, step * 64, 0, full + at);
                to += a.w[i].rows * 128;
            }
        }
        return;
    }
    float acc[kColumns / 2];
    for (int step = 0; step < n_steps; ++step) {
        const int at = step % kStages;
        barrier_wait(full + at, (step / kStages) & 1);
        const uint32_t x = ring + at * kStageBytes, w = x + kXBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_bf16_n128(acc, matrix_descriptor(x + 32 * k), matrix_descriptor(w + 32 * k), step > 0 || k > 0);
        wgmma_commit();
        // The step before is done with its stage.
        wgmma_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(empty + (step - 1) % kStages);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");  // nothing is read above the wait
    const int row = m0 + warp * 16 + (lane >> 2), c = 2 * (lane & 3);
    int n_columns = 0;
    for (int i = 0; i < a.n_w; ++i) n_columns += a.w[i].rows;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const int column = 8 * j + c;
        if (column >= n_columns) continue;
        const GemmWeight &w = column < a.w[0].rows ? a.w[0] : column < a.w[0].rows + a.w[1].rows || a.n_w < 3 ? a.w[1] : a.w[2];
        const float by = w.scale * a.scale;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row + 8 * h >= n_rows) continue;
            const int64_t to = (row + 8 * h) * a.y_stride + a.w[0].first_column + column;
            const float low = acc[4 * j + 2 * h] * by, high = acc[4 * j + 2 * h + 1] * by;
            if (a.y_format == PK_F32) *reinterpret_cast<float2 *>(static_cast<float *>(a.y) + to) = make_float2(low, high);
            else *reinterpret_cast<uint32_t *>(static_cast<bf16 *>(a.y) + to) = pack_bf16(low, high);
        }
    }
#endif
}

}  // namespace

bool is_thin(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (!has_wgmma(l.ctx) || is_invariant(l.ctx) || max_rows < kThinLeast || a.x_scale != nullptr || a.fp4 || a.are_unpacked || a.act != PK_ACT_NONE || a.add != nullptr || a.softcap > 0.0f) return false;
    int32_t rows = 0;
    for (int i = 0; i < a.n_w; ++i) {
        if (a.w[i].bias != nullptr || a.w[i].row_scale != nullptr || a.w[i].rows % 8 || a.w[i].first_column != a.w[0].first_column + rows) return false;
        rows += a.w[i].rows;
    }
    return rows <= kColumns && ((a.y_stride | a.w[0].first_column) & 1) == 0 && reinterpret_cast<uintptr_t>(a.y) % 8 == 0;
}

int32_t launch_thin(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    GemmMaps maps;
    if (int32_t e = make_map(l, &maps.x, a.x, false, max_rows, a.k, a.x_row_bytes, kRows)) return e;
    for (int i = 0; i < 3; ++i) {
        const GemmWeight &w = a.w[i < a.n_w ? i : 0];
        if (int32_t e = make_map(l, &maps.w[i], w.data, false, w.rows, w.row_bytes / 2, w.row_bytes, w.rows)) return e;
    }
    return launch(l, "thin", thin_kernel, dim3(static_cast<unsigned>((max_rows + kRows - 1) / kRows)), dim3(kThinThreads), kThinShared, maps, a);
}

}  // namespace pk
