// What products with block scales read (include/fp4.cuh): x as a sum of e2m1 numbers, packed weights as rows of codes and scales.
#include "../../include/fp4.cuh"

namespace pk {
namespace {

// e2m1 nearest to v, ties to the even code.
__device__ __forceinline__ uint32_t f32_to_e2m1(float v) {
    const float m = fabsf(v);
    const uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return code | (signbit(v) ? 8u : 0u);
}

// The scale of a block whose largest magnitude is `most`: as its byte.
template <bool kIsMx>
__device__ __forceinline__ uint32_t scale_of(float most) {
    const float wanted = most * (1.0f / 6.0f);
    if constexpr (kIsMx) {
        const uint32_t word = __float_as_uint(wanted), up = (word >> 23) + ((word & 0x7fffffu) != 0);
        return min(max(up, 1u), 253u);
    } else {
        return __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    }
}

// A block per row. NVFP4: the factor brings the largest scale of a row to the largest that ue4m3 holds. A block of x that holds
// what is no number has a scale that is none.
template <int kFormat>
__global__ void __launch_bounds__(256) narrow_fp4_kernel(const __grid_constant__ NarrowFp4 a) {
    using F = Fp4<kFormat>;
    __shared__ float shared[9];
    wait_dependence();
    release_dependents();
    const int row = blockIdx.x, n_rows = rows_of(a.info, a.rows_symbol);
    if (row >= n_rows * a.per_token || n_rows < a.min_rows) return;
    const int64_t from = row * a.x_stride;
    float factor = 1.0f;
    if constexpr (!F::kIsMx) {
        float most = 0.0f;
        for (int k = threadIdx.x; k < a.k; k += 256) most = fmaxf(most, fabsf(load_as_f32(a.x, from + k, a.x_format)));
        for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = most;
        __syncthreads();
        for (int i = 0; i < 8; ++i) most = fmaxf(most, shared[i]);
        factor = most > 1e-30f && most < INFINITY ? most / (6.0f * 448.0f) : 1.0f;
    }
    if (threadIdx.x == 0) a.factors[row] = factor;
    const float inverse = 1.0f / factor;
    const int n_groups = (a.k + 127) / 128;
    uint8_t *out = a.out + row * a.row_bytes, *scales = out + static_cast<int64_t>(n_groups) * kTerms * 64;
    for (int block = threadIdx.x; block < n_groups * F::kScaleBytes; block += 256) {
        const int group = block / F::kScaleBytes, in = block % F::kScaleBytes, k0 = block * F::kBlock;
        float v[F::kBlock];
        if (a.is_wide && k0 + F::kBlock <= a.k) {
#pragma unroll
            for (int i = 0; i < F::kBlock; i += 8) load8(a.x, from + k0 + i, a.x_format, reinterpret_cast<float(&)[8]>(v[i]));
        } else {
#pragma unroll
            for (int i = 0; i < F::kBlock; ++i) v[i] = k0 + i < a.k ? load_as_f32(a.x, from + k0 + i, a.x_format) : 0.0f;
        }
        bool is_finite = true;
#pragma unroll
        for (int i = 0; i < F::kBlock; ++i) {
            is_finite = is_finite && fabsf(v[i]) < INFINITY;
            v[i] *= inverse;
        }
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            float most = 0.0f;
#pragma unroll
            for (int i = 0; i < F::kBlock; ++i) most = fmaxf(most, fabsf(v[i]));
            const uint32_t code = scale_of<F::kIsMx>(most);
            const float scale = fp4_scale(F::kIsMx, code), over = scale > 0.0f ? 1.0f / scale : 0.0f;
            uint32_t words[F::kBlock / 8] = {};
#pragma unroll
            for (int i = 0; i < F::kBlock; ++i) {
                const uint32_t e = f32_to_e2m1(v[i] * over);
                words[i / 8] |= e << (4 * (i & 7));
                v[i] = fmaf(-e2m1_to_f32(e), scale, v[i]);
            }
            const int at = group * kTerms + term;
            uint8_t *codes = out + at * 64 + in * (F::kBlock / 2);
            if constexpr (F::kIsMx) *reinterpret_cast<uint4 *>(codes) = make_uint4(words[0], words[1], words[2], words[3]);
            else *reinterpret_cast<uint2 *>(codes) = make_uint2(words[0], words[1]);
            scales[at * F::kScaleBytes + in] = static_cast<uint8_t>(is_finite ? code : F::kIsMx ? 255u : 127u);
        }
    }
}

struct UnpackArguments {
    const uint8_t *data;
    uint8_t *out;
    int64_t row_bytes;
    int32_t first_row, n_rows, n_units;
};

// A warp per unit of 16 rows x 128: lane (r, c) writes block c of rows r and r + 8.
template <int kFormat>
__global__ void __launch_bounds__(128) unpack_fp4_kernel(const __grid_constant__ UnpackArguments a) {
    using U = Unit<kFormat>;
    wait_dependence();
    release_dependents();
    const int lane = threadIdx.x & 31, c = lane & 3, unit = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (unit >= a.n_units) return;
    UnitRegisters<U> u;
    load_unit<U>(u, a.data + ((static_cast<int64_t>(a.first_row >> 4) + blockIdx.y) * a.n_units + unit) * U::kBytes, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 codes = fp4_block(u, half);
        const int row = blockIdx.y * 16 + (lane >> 2) + 8 * half;
        if (row >= a.n_rows) continue;
        uint8_t *out = a.out + row * a.row_bytes;
        *reinterpret_cast<uint4 *>(out + unit * 64 + c * 16) = codes;
        if (c < U::kRowScaleBytes / 4) *reinterpret_cast<uint32_t *>(out + static_cast<int64_t>(a.n_units) * 64 + unit * U::kRowScaleBytes + 4 * c) = fp4_scales<kFormat>(u, half, c);
    }
}

}  // namespace

int32_t launch_narrow_fp4(const Launch &l, int32_t format, NarrowFp4 a, int64_t max_rows) {
    a.info = l.info;
    a.is_wide = ((a.x_stride * (a.x_format == PK_F32 ? 4 : 2)) & 15) == 0 && (reinterpret_cast<uintptr_t>(a.x) & 15) == 0;
    const dim3 grid(static_cast<unsigned>(max_rows)), block(256);
    return format == PK_MXFP4 ? launch(l, "narrow_fp4", narrow_fp4_kernel<PK_MXFP4>, grid, block, 0, a) : launch(l, "narrow_fp4", narrow_fp4_kernel<PK_NVFP4>, grid, block, 0, a);
}

int32_t launch_unpack_fp4(const Launch &l, const Packed &p, uint64_t data, int64_t first_row, int64_t n_rows, void *out, int64_t row_bytes) {
    const UnpackArguments a = {reinterpret_cast<const uint8_t *>(data), static_cast<uint8_t *>(out), row_bytes, static_cast<int32_t>(first_row), static_cast<int32_t>(n_rows), static_cast<int32_t>(p.padded_cols / 128)};
    const dim3 grid((a.n_units + 3) / 4, static_cast<unsigned>((n_rows + 15) / 16)), block(128);
    return p.format == PK_MXFP4 ? launch(l, "unpack_fp4", unpack_fp4_kernel<PK_MXFP4>, grid, block, 0, a) : launch(l, "unpack_fp4", unpack_fp4_kernel<PK_NVFP4>, grid, block, 0, a);
}

}  // namespace pk
