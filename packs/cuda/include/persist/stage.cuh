// x of a phase into shared memory, normed on the way, in the order and precision that the weights' format wants.
//
// bf16: rows x_row_bytes apart. Integers: per 32 elements and row a scale and two bytes an element (high, low), laid out as
// [block of 32][row][part][lane % 4][8 bytes], which are the B operand of mma m16n8k32; behind them [block][row] (scale,
// scale * sum of the first 16, of the second 16, unused).
#pragma once
#include "phase.h"
#include "ring.cuh"

namespace pk::persist {

constexpr float kMostInteger = 32512.0f;  // 127 * 256: the low byte may round up

// Four neighbours at element `at` (row included). False: not written yet.
__device__ __forceinline__ bool load4(const Place &p, int64_t at, uint32_t epoch, float *v) {
    if (p.format == PK_F32) {
        const uint4 a = load_packets2(reinterpret_cast<const void *>(p.packets + at * 8)), b = load_packets2(reinterpret_cast<const void *>(p.packets + at * 8 + 16));
        v[0] = __uint_as_float(a.x); v[1] = __uint_as_float(a.z); v[2] = __uint_as_float(b.x); v[3] = __uint_as_float(b.z);
        return a.y == epoch && a.w == epoch && b.y == epoch && b.w == epoch;
    }
    const uint4 a = load_packets2(reinterpret_cast<const void *>(p.packets + at * 4));
    v[0] = low_f32(a.x); v[1] = high_f32(a.x); v[2] = low_f32(a.z); v[3] = high_f32(a.z);
    return a.y == epoch && a.w == epoch;
}
// One element; waits for it.
__device__ __forceinline__ float load_one(const Place &p, int64_t at, uint32_t epoch) {
    const void *from = reinterpret_cast<const void *>(p.packets + (p.format == PK_F32 ? at * 8 : at / 2 * 8));
    uint2 w;
    do w = load_packet(from);
    while (w.y != epoch);
    return p.format == PK_F32 ? __uint_as_float(w.x) : at & 1 ? high_f32(w.x) : low_f32(w.x);
}
// One lane asks for one packet until it is there: many would be in the way of the weights.
__device__ __forceinline__ void await(const Place &p, int64_t at, uint32_t epoch) {
    if ((threadIdx.x & 31) == 0) load_one(p, at, epoch);
    __syncwarp();
}

// Writes an element to memory and to whoever waits for it. All lanes of a warp call it, with neighbours side by side.
__device__ __forceinline__ void write_output(const Place &p, int64_t at, float v, bool is_valid, uint32_t epoch) {
    if (is_valid && p.data) store_from_f32(reinterpret_cast<void *>(p.data), at, p.format, v);
    if (!p.packets) return;
    if (p.format == PK_F32) {
        if (is_valid) store_packet(reinterpret_cast<void *>(p.packets + at * 8), __float_as_uint(v), epoch);
    } else {
        const float next = __shfl_down_sync(~0u, v, 1);
        if (is_valid && !(at & 1)) store_packet(reinterpret_cast<void *>(p.packets + at * 4), pack_bf16(v, next), epoch);
    }
}

// Eight elements of piece i of a row: whole pieces for bf16, the halves of a lane's share of 32 for integers.
template <bool kInteger>
__device__ __forceinline__ int first_of(int piece) { return kInteger ? (piece >> 2) * 32 + (piece & 3) * 4 : piece * 8; }
template <bool kInteger>
__device__ __forceinline__ bool load_piece(const Place &p, int64_t row_at, int piece, uint32_t epoch, float *v) {
    const int first = first_of<kInteger>(piece);
    const bool a = load4(p, row_at + first, epoch, v), b = load4(p, row_at + first + (kInteger ? 16 : 4), epoch, v + 4);
    return a && b;
}

__device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <int kRows>
__device__ __forceinline__ void put_integers(uint8_t *xs, float *scales, const float *v, int piece, int row, bool is_bytes) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float inverse = most > 1e-30f ? __fdividef(kMostInteger, most) : 0.0f, scale = most * (1.0f / kMostInteger);
    int low[8], high[8], first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int q = __float2int_rn(v[i] * inverse);
        low[i] = (q << 24) >> 24;
        high[i] = (q - low[i]) >> 8;
        if (i < 4) first += q; else second += q;
    }
    first += __shfl_xor_sync(~0u, first, 1);
    first += __shfl_xor_sync(~0u, first, 2);
    second += __shfl_xor_sync(~0u, second, 1);
    second += __shfl_xor_sync(~0u, second, 2);
    const int block = piece >> 2, c = piece & 3;
    uint8_t *to = xs + (block * kRows + row) * 64 + c * 8;
    auto words = [&](const int(&q)[8]) {
        return is_bytes ? make_uint2(pack_bytes(q[0], q[2], q[1], q[3]), pack_bytes(q[4], q[6], q[5], q[7]))
                        : make_uint2(pack_bytes(q[0], q[4], q[1], q[5]), pack_bytes(q[2], q[6], q[3], q[7]));
    };
    *reinterpret_cast<uint2 *>(to) = words(high);
    *reinterpret_cast<uint2 *>(to + 32) = words(low);
    if (c == 0) *reinterpret_cast<float4 *>(scales + (block * kRows + row) * 4) = make_float4(scale, scale * first, scale * second, 0.0f);
}

__device__ __forceinline__ void put_bf16(uint8_t *row, const float *v, int piece, bool is_fp8) {
    if (!is_fp8) {
        *reinterpret_cast<uint4 *>(row + piece * 16) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        return;
    }
    // A lane reads 16 neighbours of a run of 64 as two halves; within four, even elements come first.
    const int run = piece >> 3, in = piece & 7;
    *reinterpret_cast<uint4 *>(row + run * 128 + (in & 1) * 64 + (in >> 1) * 16) =
        make_uint4(pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3]), pack_bf16(v[4], v[6]), pack_bf16(v[5], v[7]));
}

// What was in memory before this launch becomes packets: each block a share of the rows' elements.
__device__ __forceinline__ void publish(const Phase &p, int n_rows, uint32_t epoch) {
    for (int row = 0; row < n_rows; ++row)
        for (int i = 2 * (blockIdx.x * kConsumers + threadIdx.x); i < p.k; i += 2 * gridDim.x * kConsumers) {
            const int64_t at = row * p.x.stride + i;
            if (p.x.format == PK_F32) {
                const float2 v = __ldcg(reinterpret_cast<const float2 *>(p.x.data + at * 4));
                store_packet(reinterpret_cast<void *>(p.y.packets + at * 8), __float_as_uint(v.x), epoch);
                store_packet(reinterpret_cast<void *>(p.y.packets + at * 8 + 8), __float_as_uint(v.y), epoch);
            } else {
                store_packet(reinterpret_cast<void *>(p.y.packets + at * 4), __ldcg(reinterpret_cast<const uint32_t *>(p.x.data + at * 2)), epoch);
            }
        }
}

// Stages part `part` of every row. rms: kWarps floats of shared memory; rows: which row of x each row is.
template <int kRows, bool kInteger, bool kNorm>
__device__ __forceinline__ void stage(const Phase &p, uint8_t *xs, float *rms, const int *rows, int part, int n_rows, uint32_t base) {
    constexpr int kPerRow = kConsumers / kRows, kWarpsRow = kPerRow / 32, kKept = kNorm ? 1 : 3;
    const int tid = threadIdx.x, row = tid / kPerRow, mine = tid % kPerRow, warp = tid >> 5;
    const bool is_row = row < n_rows;
    const int64_t row_at = (p.is_gathered ? rows[row] : row) * p.x.stride;
    const uint32_t epoch = base + p.x.source + 1;
    const int count = p.k / p.n_parts, pieces = count / 8, all = p.k / 8, first_piece = part * pieces;
    float v[kKept][8], w[kKept][8];
    auto load = [&](int first, int end, int offset) {
        bool ok;
        do {
            ok = true;
#pragma unroll
            for (int j = 0; j < kKept; ++j) {
                const int i = first + j * kPerRow + mine;
                if (is_row && i < end) {
                    ok &= load_piece<kInteger>(p.x, row_at, offset + i, epoch, v[j]);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e) v[j][e] = 0.0f;
                }
            }
        } while (!ok);
    };
    auto load_norm = [&](int first, int offset) {
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int i = first + j * kPerRow + mine;
            if (i >= pieces) continue;
            const float *from = p.norm + first_of<kInteger>(offset + i);
            *reinterpret_cast<float4 *>(w[j]) = __ldg(reinterpret_cast<const float4 *>(from));
            *reinterpret_cast<float4 *>(w[j] + 4) = __ldg(reinterpret_cast<const float4 *>(from + (kInteger ? 16 : 4)));
        }
    };
    float factor = 1.0f;
    const bool is_kept = p.n_parts == 1 && all <= kKept * kPerRow;
    if (kNorm && is_kept) load_norm(0, 0);
    if (is_row && (mine & ~31) < all) await(p.x, row_at + first_of<kInteger>((kNorm ? 0 : first_piece) + mine), epoch);
    if constexpr (kNorm) {
        float s = 0.0f;
        for (int first = 0; first < all; first += kKept * kPerRow) {
            load(first, all, 0);
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) s += v[j][e] * v[j][e];
        }
        s = warp_sum(s);
        if ((tid & 31) == 0) rms[warp] = s;
        join_consumers(kConsumers);
        s = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarpsRow; ++i) s += rms[row * kWarpsRow + i];
        factor = rsqrtf(__fdividef(s, static_cast<float>(p.k)) + p.eps);
    }
    const int x_row = x_row_bytes(p.staging, count);
    float *scales = reinterpret_cast<float *>(xs + kRows * x_row);
    for (int first = 0; first < pieces; first += kKept * kPerRow) {
        if (!kNorm || !is_kept) {
            load(first, pieces, first_piece);
            if (kNorm) load_norm(first, first_piece);
        }
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int i = first + j * kPerRow + mine;
            if (first + j * kPerRow + (mine & ~31) >= pieces) break;  // whole warps
            if (kNorm && i < pieces) {
#pragma unroll
                for (int e = 0; e < 8; ++e) v[j][e] *= factor * w[j][e];
                if (p.normed.data && is_row && row == static_cast<int>(blockIdx.x)) {
                    uint2 *to = reinterpret_cast<uint2 *>(reinterpret_cast<bf16 *>(p.normed.data) + row * p.normed.stride + first_of<kInteger>(first_piece + i));
                    to[0] = make_uint2(pack_bf16(v[j][0], v[j][1]), pack_bf16(v[j][2], v[j][3]));
                    to[kInteger ? 4 : 1] = make_uint2(pack_bf16(v[j][4], v[j][5]), pack_bf16(v[j][6], v[j][7]));
                }
            }
            if constexpr (kInteger) {
                put_integers<kRows>(xs, scales, v[j], i, row, p.staging == kStageBytes);
            } else {
                if (i < pieces) put_bf16(xs + row * x_row, v[j], i, p.staging == kStageFp8);
            }
        }
    }
}

}  // namespace pk::persist
