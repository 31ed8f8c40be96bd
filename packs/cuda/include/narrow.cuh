// Elementwise ops that leave what they make narrowed to FP8, too, for the product behind them.
#pragma once
#include "device.cuh"
#include "quantise.cuh"
#include "skinny.cuh"

namespace pk {

// Eight neighbours from column k on of a row whose groups of 128 columns are sixteen lanes each; rounded to bf16 first, as a product would find them.
__device__ __forceinline__ void narrow8(const Narrowed &to, int64_t row, int k, float (&v)[8]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i] = __bfloat162float(__float2bfloat16(v[i]))));
#pragma unroll
    for (int far = 8; far; far /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffu << (threadIdx.x & 16), most, far));
    const float scale = most > 0.0f ? most / 448.0f : 1.0f, inverse = 1.0f / scale;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i] * inverse, v[2 * i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
    *reinterpret_cast<uint2 *>(to.x + row * to.row_bytes + k) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    if ((threadIdx.x & 15) == 0) to.scales[(k >> 7) * to.scale_stride + row] = scale;
}

// What a product with FP8 weights is handed and hands on: x where it lies narrowed already; where y, or what is left for a norm's second half, goes narrowed; where sums of
// squares lie; room for an x of its own.
struct Handed {
    Narrowed x, left;
    float *squares = nullptr;
    uint8_t *scratch = nullptr;
};
int32_t launch_matmul_beside(const Launch &l, const pk_op_matmul &op, const Beside &beside, const Handed &handed, const pk_op_matmul *next = nullptr);
// With the product behind it, where one is known.
int32_t launch_matmul(const Launch &l, const pk_op_matmul &op, const pk_op_matmul *next);
// Of the scratch, in a run of such products: a row's sums of squares of 64 columns or more each, and with what a norm's first half leaves narrowed behind them.
int64_t squares_bytes(int64_t max_rows, int64_t cols);
int64_t half_scratch(int64_t max_rows, int64_t cols);

class Records;

// The product behind record `at` with nothing but norms, or heads and attention, between them; null: there is none.
const pk_op_matmul *next_product(const Records &records, int64_t at, int64_t end);

// Products of few rows with what lies between them: the norm behind one and before the next is made by both, heads by the product that they come from, and FP8's rows go
// from one to the next narrowed. The record behind all of it that this has enqueued; i when there is none.
int64_t launch_beside(const Records &records, const Launch &l, int64_t i, int64_t end, int32_t *status);

// A norm, a sigmoid gate or attention whose rows the next records multiply with FP8 weights leaves them narrowed, and so does a gated product for the next. The
// record behind those that this has enqueued; i when record i does not begin such a run.
int64_t launch_narrowing(const Records &records, const Launch &l, int64_t i, int64_t end, int32_t *status);

// launch_sigmoid that leaves its output narrowed, too, where it can.
bool can_narrow(const pk_op_sigmoid &op);
int32_t launch_sigmoid_narrowing(const Launch &l, const pk_op_sigmoid &op, const Narrowed &to);

}  // namespace pk
