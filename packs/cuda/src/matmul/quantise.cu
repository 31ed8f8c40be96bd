// Activations to e4m3 with one scale per row and 128 columns: what products with FP8 weights of many rows read.
#include "../../include/quantise.cuh"

#include "../../include/device.cuh"
#include "../../include/gemm.cuh"

namespace pk {
namespace {

constexpr int kEach = 8;  // rows that a warp has under way

// The largest of eight numbers of each of kLanes lanes; lanes halve what they hold and what they stand for. Lane i of them ends up with number i * 8 / kLanes.
template <int kLanes>
__device__ __forceinline__ float largest_of_eight(float (&most)[kEach], int lane) {
#pragma unroll
    for (int n = kEach / 2, far = kLanes / 2; n; n /= 2, far /= 2)
#pragma unroll
        for (int r = 0; r < n; ++r) {
            const bool upper = lane & far;
            const float other = __shfl_xor_sync(~0u, upper ? most[r] : most[r + n], far);
            most[r] = fmaxf(upper ? most[r + n] : most[r], other);
        }
#pragma unroll
    for (int far = kLanes / 16; far; far /= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], far));
    return most[0];
}

// A warp per group of 128 columns of eight rows. scales [K/128][rows]. Grid: groups of eight groups, groups of eight rows.
__global__ void __launch_bounds__(256) quantise_kernel(const __grid_constant__ QuantiseArguments a) {
    wait_dependence();
    release_dependents();
    const int row0 = blockIdx.y * kEach, lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), n_rows = rows_of(a.info, a.rows_symbol);
    if (row0 >= n_rows || n_rows < a.min_rows || g * 128 >= a.out_stride) return;
    const int first = g * 128 + lane * 4;
    float v[kEach][4];
    auto at = [&](int r) { return min(row0 + r, n_rows - 1) * a.x_stride + first; };
    const bool is_in = first < a.k;
    // One decision for all loads, so that they are under way together.
    if (a.is_wide) {
#pragma unroll
        for (int r = 0; r < kEach; ++r) {
            const float4 p = is_in ? *reinterpret_cast<const float4 *>(static_cast<const float *>(a.x) + at(r)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[r][0] = p.x; v[r][1] = p.y; v[r][2] = p.z; v[r][3] = p.w;
        }
    } else {
#pragma unroll
        for (int r = 0; r < kEach; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[r][i] = first + i < a.k ? load_as_f32(a.x, at(r) + i, a.x_format) : 0.0f;
    }
    float most[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) most[r] = fmaxf(fmaxf(fabsf(v[r][0]), fabsf(v[r][1])), fmaxf(fabsf(v[r][2]), fabsf(v[r][3])));
    const float own = largest_of_eight<32>(most, lane), scale = own > 0.0f ? own / 448.0f : 1.0f, inverse = 1.0f / scale;
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
        const float f = __shfl_sync(~0u, inverse, r * 4);
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[r][0] * f, v[r][1] * f), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[r][2] * f, v[r][3] * f), __NV_SATFINITE, __NV_E4M3);
        if (row0 + r < n_rows) *reinterpret_cast<uint32_t *>(a.out + (row0 + r) * a.out_stride + first) = low | high << 16;
    }
    if ((lane & 3) == 0 && row0 + lane / 4 < n_rows) a.scales[g * a.scale_stride + row0 + lane / 4] = scale;
}

// The same of x in bf16 whose rows can be read 16 bytes at a time: a warp per two groups. Grid: groups of eight pairs of groups, groups of eight rows.
__global__ void __launch_bounds__(256, 4) quantise_pairs_kernel(const __grid_constant__ QuantiseArguments a) {
    wait_dependence();
    release_dependents();
    const int row0 = blockIdx.y * kEach, lane = threadIdx.x & 31, pair = blockIdx.x * 8 + (threadIdx.x >> 5), g = pair * 2 + (lane >> 4), first = pair * 256 + lane * 8, n_rows = rows_of(a.info, a.rows_symbol);
    if (row0 >= n_rows || n_rows < a.min_rows || pair * 256 >= a.out_stride) return;
    const bf16 *from = static_cast<const bf16 *>(a.x) + first;
    uint4 v[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) v[r] = first < a.k ? *reinterpret_cast<const uint4 *>(from + min(row0 + r, n_rows - 1) * a.x_stride) : make_uint4(0, 0, 0, 0);
    float most[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
        const bf162 m = __hmax2(__hmax2(__habs2(as_bf162(v[r].x)), __habs2(as_bf162(v[r].y))), __hmax2(__habs2(as_bf162(v[r].z)), __habs2(as_bf162(v[r].w))));
        most[r] = fmaxf(low_f32(bits(m)), high_f32(bits(m)));
    }
    const float own = largest_of_eight<16>(most, lane), scale = own > 0.0f ? own / 448.0f : 1.0f, inverse = 1.0f / scale;
    if (first >= a.out_stride) return;  // whole halves of a warp
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
        const float f = __shfl_sync(0xffffu << (lane & 16), inverse, (lane & 16) + r * 2);
        auto codes = [&](uint32_t p) { return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(low_f32(p) * f, high_f32(p) * f), __NV_SATFINITE, __NV_E4M3)); };
        if (row0 + r < n_rows) *reinterpret_cast<uint2 *>(a.out + (row0 + r) * a.out_stride + first) = make_uint2(codes(v[r].x) | codes(v[r].y) << 16, codes(v[r].z) | codes(v[r].w) << 16);
    }
    if ((lane & 1) == 0 && row0 + (lane & 15) / 2 < n_rows) a.scales[g * a.scale_stride + row0 + (lane & 15) / 2] = scale;
}

}  // namespace

int32_t launch_quantise(const Launch &l, QuantiseArguments a, int64_t max_rows) {
    Launch own = l;
    own.overlap = max_rows <= kFp8ClusterRows;  // with more it was no gain (LOG.md, M43 and M45)
    a.info = l.info;
    const bool is_aligned = (reinterpret_cast<uintptr_t>(a.x) & 15) == 0;
    const unsigned rows = static_cast<unsigned>((max_rows + kEach - 1) / kEach);
    if (is_aligned && a.x_format == PK_BF16 && ((a.x_stride | a.k) & 7) == 0)
        return launch(own, "quantise", quantise_pairs_kernel, dim3(static_cast<unsigned>((a.out_stride / 128 + 15) / 16), rows), dim3(256), 0, a);
    a.is_wide = is_aligned && a.x_format == PK_F32 && ((a.x_stride | a.k) & 3) == 0;
    return launch(own, "quantise", quantise_kernel, dim3(static_cast<unsigned>((a.out_stride / 128 + 7) / 8), rows), dim3(256), 0, a);
}

// Scales of one group of 128 columns: whole tiles of rows (at most 256), so that they can be copied a tile at a time.
static int64_t scale_stride(int64_t max_rows) { return (max_rows + 255) / 256 * 256; }

int64_t fp8_scratch(int64_t max_rows, int64_t cols) {
    const int64_t padded = (cols + 127) / 128 * 128;
    return (max_rows * padded + 255) / 256 * 256 + padded / 128 * scale_stride(max_rows) * 4 + 256;
}

Narrowed narrowed_in(uint8_t *scratch, int64_t max_rows, int64_t cols) {
    const int64_t padded = (cols + 127) / 128 * 128;
    return {scratch, reinterpret_cast<float *>(scratch + (max_rows * padded + 255) / 256 * 256), padded, scale_stride(max_rows)};
}

int32_t narrow_fp8(const Launch &l, GemmArguments &a, int64_t max_rows, int32_t x_format, const Narrowed &given) {
    const Narrowed to = given.x ? given : narrowed_in(l.scratch, max_rows, a.k);
    const int64_t stride = a.x_row_bytes / (x_format == PK_F32 ? 4 : 2);
    QuantiseArguments q = {a.x, to.x, to.scales, nullptr, stride, to.row_bytes, to.scale_stride, a.rows_symbol, x_format, a.k, a.min_rows, 0};
    if (!given.x)
        if (int32_t e = launch_quantise(l, q, max_rows)) return e;
    a.x = to.x;
    a.x_row_bytes = to.row_bytes;
    a.x_scale = to.scales;
    a.x_scale_stride = to.scale_stride;
    return PK_OK;
}

}  // namespace pk
