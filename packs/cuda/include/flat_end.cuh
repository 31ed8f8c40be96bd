// Where products of few rows end that have a tile's sums whole (flat.cuh, flat_units.cuh): lane (r, q) of a warp has rows r and r + 8 of W and rows n8 + 2q and n8 + 2q + 1 of x.
#pragma once
#include "flat_heads.cuh"
#include "flat_step.cuh"
#include "skinny_norm.cuh"

namespace pk {

// Whether an end has nothing but a scale (of all weights together), what is added and a norm's half, or is SiLU of gate times up in bf16, and no tile goes past its weight.
inline bool is_plain(const SkinnyArguments &a, bool gated) {
    if (a.softcap > 0.0f || (gated ? a.act != PK_ACT_SILU || a.add || a.y_format != PK_BF16 : a.act != PK_ACT_NONE)) return false;
    int column = a.w[0].first_column;
    for (int i = 0; i < a.n_w; ++i) {
        const SkinnyWeight &w = a.w[i];
        if (w.row_scale || w.bias || w.scale != a.w[0].scale || w.rows % (gated ? 8 : 16) || (!gated && w.first_column != column)) return false;
        column += w.rows;
    }
    return true;
}

// What is added: F32 or BF16.
__device__ __forceinline__ float load_added(const void *from, int64_t at, int32_t format) { return format == PK_F32 ? static_cast<const float *>(from)[at] : __bfloat162float(static_cast<const bf16 *>(from)[at]); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What outputs want beside their sums: old values, gains of the norm's half. row: a lane's first one; x_row: of x, of either of a lane's two.
template <class Row>
__device__ __forceinline__ void load_beside(const SkinnyArguments &a, const SkinnyWeight &w, int row, const Row &x_row, int n_rows, float (&old)[4], float (&gain)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int64_t column = w.first_column + row + 8 * h;
        gain[h] = a.norm.out != nullptr && row + 8 * h < w.rows ? __ldg(a.norm.w + column) : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int n = x_row(e);
            old[2 * h + e] = a.add != nullptr && n < n_rows && row + 8 * h < w.rows ? load_added(a.add, n * a.add_stride + column, a.add_format) : 0.0f;
        }
    }
}

// v: sums of rows `row` and row + 8; tile: of 16 columns of y.
__device__ __forceinline__ void end_tile(const SkinnyArguments &a, const SkinnyWeight &w, int tile, int row, int n0, int n_rows, int lane, const float *factors, const float (&v)[4], const float (&old)[4], const float (&gain)[2]) {
    float out[4], squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const bool is_here = row + 8 * h < w.rows;
        const float f0 = w.scale * a.scale * (is_here && w.row_scale ? w.row_scale[row + 8 * h] : 1.0f), b0 = is_here && w.bias ? w.bias[row + 8 * h] * a.scale : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e) out[2 * h + e] = v[2 * h + e] * (f0 * factors[n0 + e]) + b0;
    }
    if (a.act == PK_ACT_NONE && a.softcap <= 0.0f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] += old[i];
    } else {
        // Once in the code, and no function: a call would hold the kernel to the registers that it is launched with.
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const float beside = i == 0 ? old[0] : i == 1 ? old[1] : i == 2 ? old[2] : old[3];
            float u = a.act != PK_ACT_NONE ? out[0] * activate(beside, a.act) : out[0];
            if (a.softcap > 0.0f) u = a.softcap * quick_tanh(u / a.softcap);
            if (a.act == PK_ACT_NONE) u += beside;
            out[0] = out[1]; out[1] = out[2]; out[2] = out[3]; out[3] = u;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= w.rows) continue;
        const int64_t column = w.first_column + row + 8 * h;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int n = n0 + e;
            if (n >= n_rows) continue;
            const float u = out[2 * h + e];
            squares[e] += u * u;
            if (a.y_format == PK_F32) static_cast<float *>(a.y)[n * a.y_stride + column] = u;
            else static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(u);
            if (a.norm.out != nullptr) static_cast<bf16 *>(a.norm.out)[n * a.norm.out_stride + column] = __float2bfloat16(u * gain[h]);
        }
    }
    if (a.norm.out == nullptr) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int far = 4; far < 32; far *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], far);
        if (lane < 4 && n_rows > 0) a.norm.squares[tile * a.norm.stride + n0 + e] = squares[e];
    }
}

// Ends that are plain. by: what a lane's two rows of x are multiplied by; is_row: whether they are there; column: of y, the lane's first one; n0: the first of its rows of x.
__device__ __forceinline__ void end_plain(const SkinnyArguments &a, const float (&by)[2], const bool (&is_row)[2], int64_t column, int tile, int n0, bool leaves_squares, float (&v)[4], const float (&old)[4], const float (&gain)[2]) {
    const int64_t at = n0 * a.y_stride + column;
    float squares[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) v[2 * h + e] = v[2 * h + e] * by[e] + old[2 * h + e];
        squares[e] = v[e] * v[e] + v[2 + e] * v[2 + e];
    }
    if (a.y_format == PK_F32) {
        float *y = static_cast<float *>(a.y) + at;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_row[i & 1]) y[(i & 1) * a.y_stride + 8 * (i >> 1)] = v[i];
    } else {
        bf16 *y = static_cast<bf16 *>(a.y) + at;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_row[i & 1]) y[(i & 1) * a.y_stride + 8 * (i >> 1)] = __float2bfloat16(v[i]);
    }
    if (a.norm.out != nullptr) {
        bf16 *out = static_cast<bf16 *>(a.norm.out) + n0 * a.norm.out_stride + column;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_row[i & 1]) out[(i & 1) * a.norm.out_stride + 8 * (i >> 1)] = __float2bfloat16(v[i] * gain[i >> 1]);
#pragma unroll
        for (int far = 4; far < 32; far *= 2) {
            squares[0] += __shfl_xor_sync(~0u, squares[0], far);
            squares[1] += __shfl_xor_sync(~0u, squares[1], far);
        }
        if (leaves_squares) *reinterpret_cast<float2 *>(a.norm.squares + tile * a.norm.stride + n0) = make_float2(squares[0], squares[1]);
    }
}
// v: sums of a row of gate, then of up.
__device__ __forceinline__ void end_plain_gated(const SkinnyArguments &a, const float (&by)[2], const bool (&is_row)[2], int64_t column, int n0, const float (&v)[4]) {
    bf16 *y = static_cast<bf16 *>(a.y) + n0 * a.y_stride + column;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float gate = v[e] * by[e];
        if (is_row[e]) y[e * a.y_stride] = __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * (v[2 + e] * by[e]) * a.scale);
    }
}

// v: sums of row `row` of gate, then of up; x_row: of x, of either of a lane's two.
template <class Row>
__device__ __forceinline__ void end_gated(const SkinnyArguments &a, int row, const Row &x_row, int n_rows, const float *factors, const float (&v)[4]) {
    const SkinnyWeight &w = a.w[0], &u = a.w[1];
    if (row >= w.rows) return;
    const float f0 = w.scale * (w.row_scale ? w.row_scale[row] : 1.0f), b0 = w.bias ? w.bias[row] : 0.0f, f1 = u.scale * (u.row_scale ? u.row_scale[row] : 1.0f), b1 = u.bias ? u.bias[row] : 0.0f;
    const bool is_usual = a.act == PK_ACT_SILU && a.softcap <= 0.0f && a.add == nullptr && a.y_format == PK_BF16;
    const int64_t column = w.first_column + row;
    if (is_usual) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int n = x_row(e);
            const float gate = v[e] * (f0 * factors[n]) + b0, up = v[2 + e] * (f1 * factors[n]) + b1;
            if (n < n_rows) static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up * a.scale);
        }
        return;
    }
#pragma unroll 1
    for (int e = 0; e < 2; ++e) {
        const int n = x_row(e);
        if (n >= n_rows) continue;
        const float gate = (e ? v[1] : v[0]) * (f0 * factors[n]) + b0, up = (e ? v[3] : v[2]) * (f1 * factors[n]) + b1;
        float out = activate(gate, a.act) * up * a.scale;
        if (a.softcap > 0.0f) out = a.softcap * quick_tanh(out / a.softcap);
        if (a.add != nullptr) out += load_added(a.add, n * a.add_stride + column, a.add_format);
        if (a.y_format == PK_F32) static_cast<float *>(a.y)[n * a.y_stride + column] = out;
        else static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(out);
    }
}

#endif

}  // namespace pk
