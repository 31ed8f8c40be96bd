// Activations to e4m3 with one scale per row and 128 columns: what products with FP8 weights of many rows read.
#include "../../include/quantise.cuh"

#include "../../include/device.cuh"
#include "../../include/gemm.cuh"

namespace pk {
namespace {

constexpr int kEach = 8;  // rows that a warp has under way

// A warp per group of 128 columns of eight rows. scales [K/128][rows]. Grid: groups of eight groups, groups of eight rows.
__global__ void __launch_bounds__(256) quantise_kernel(const __grid_constant__ QuantiseArguments a) {
    wait_dependence();
    release_dependents();
    const int row0 = blockIdx.y * kEach, lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), n_rows = rows_of(a.info, a.rows_symbol);
    if (row0 >= n_rows || n_rows < a.min_rows || g * 128 >= a.out_stride) return;
    const int first = g * 128 + lane * 4;
    float v[kEach][4];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
        const int64_t at = min(row0 + r, n_rows - 1) * a.x_stride + first;
        if (a.is_wide && first < a.k) {
            if (a.x_format == PK_BF16) {
                const uint2 p = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(a.x) + at);
                v[r][0] = low_f32(p.x); v[r][1] = high_f32(p.x); v[r][2] = low_f32(p.y); v[r][3] = high_f32(p.y);
            } else {
                const float4 p = *reinterpret_cast<const float4 *>(static_cast<const float *>(a.x) + at);
                v[r][0] = p.x; v[r][1] = p.y; v[r][2] = p.z; v[r][3] = p.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[r][i] = first + i < a.k ? load_as_f32(a.x, at + i, a.x_format) : 0.0f;
        }
    }
    float mine = 0.0f;  // the scale of row `lane`
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
        float most = fmaxf(fmaxf(fabsf(v[r][0]), fabsf(v[r][1])), fmaxf(fabsf(v[r][2]), fabsf(v[r][3])));
        for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        const float scale = most > 0.0f ? most / 448.0f : 1.0f, inverse = 1.0f / scale;
        if (lane == r) mine = scale;
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[r][0] * inverse, v[r][1] * inverse), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[r][2] * inverse, v[r][3] * inverse), __NV_SATFINITE, __NV_E4M3);
        if (row0 + r < n_rows) *reinterpret_cast<uint32_t *>(a.out + (row0 + r) * a.out_stride + first) = low | high << 16;
    }
    if (lane < kEach && row0 + lane < n_rows) a.scales[g * a.scale_stride + row0 + lane] = mine;
}

}  // namespace

int32_t launch_quantise(const Launch &l, QuantiseArguments a, int64_t max_rows) {
    a.info = l.info;
    a.is_wide = ((a.x_stride | a.k) & 3) == 0 && (reinterpret_cast<uintptr_t>(a.x) & 15) == 0;
    return launch(l, "quantise", quantise_kernel, dim3(static_cast<unsigned>((a.out_stride / 128 + 7) / 8), static_cast<unsigned>((max_rows + kEach - 1) / kEach)), dim3(256), 0, a);
}

// Scales of one group of 128 columns: whole tiles of rows (at most 256), so that they can be copied a tile at a time.
static int64_t scale_stride(int64_t max_rows) { return (max_rows + 255) / 256 * 256; }

int64_t fp8_scratch(int64_t max_rows, int64_t cols) {
    const int64_t padded = (cols + 127) / 128 * 128;
    return (max_rows * padded + 255) / 256 * 256 + padded / 128 * scale_stride(max_rows) * 4 + 256;
}

int32_t narrow_fp8(const Launch &l, GemmArguments &a, int64_t max_rows, int32_t x_format) {
    const int64_t padded = (a.k + 127) / 128 * 128;
    uint8_t *x = l.scratch;
    float *scales = reinterpret_cast<float *>(l.scratch + (max_rows * padded + 255) / 256 * 256);
    const int64_t stride = a.x_row_bytes / (x_format == PK_F32 ? 4 : 2);
    QuantiseArguments q = {a.x, x, scales, nullptr, stride, padded, scale_stride(max_rows), a.rows_symbol, x_format, a.k, a.min_rows, 0};
    if (int32_t e = launch_quantise(l, q, max_rows)) return e;
    a.x = x;
    a.x_row_bytes = padded;
    a.x_scale = scales;
    a.x_scale_stride = scale_stride(max_rows);
    return PK_OK;
}

}  // namespace pk
