// x of a phase into shared memory, normed on the way, in the order and precision that the weights' format wants.
//
// bf16: rows x_row_bytes apart. Integers: per 32 elements and row a scale and two bytes an element (high, low), laid out as
// [block of 32][row][part][lane % 4][8 bytes], which are the B operand of mma m16n8k32; behind them [block][row] (scale,
// sum of the first 16, of the second 16, unused).
#pragma once
#include "phase.h"
#include "ring.cuh"

namespace pk::persist {

// Times of one block's first thread, for the bench.
__device__ __forceinline__ void mark(const Arguments &a, int phase, int at) {
#ifdef PK_PERSIST_TRACE
    if (a.trace && threadIdx.x == 0 && blockIdx.x == 5) a.trace[phase * 8 + at] = clock64();
#endif
}

constexpr float kMostInteger = 32512.0f;  // 127 * 256: the low byte may round up

// Where a packet of element `at` lies, and whose it is.
template <bool kF32>
__device__ __forceinline__ const uint8_t *packet_at(uint64_t packets, int64_t at) { return reinterpret_cast<const uint8_t *>(packets) + at * (kF32 ? 8 : 4); }
// Four neighbours. False: not written yet.
template <bool kF32>
__device__ __forceinline__ bool load4(const uint8_t *from, uint32_t epoch, float *v) {
    const uint4 a = load_packets2(from);
    if constexpr (kF32) {
        const uint4 b = load_packets2(from + 16);
        v[0] = __uint_as_float(a.x); v[1] = __uint_as_float(a.z); v[2] = __uint_as_float(b.x); v[3] = __uint_as_float(b.z);
        return a.y == epoch && a.w == epoch && b.y == epoch && b.w == epoch;
    }
    v[0] = low_f32(a.x); v[1] = high_f32(a.x); v[2] = low_f32(a.z); v[3] = high_f32(a.z);
    return a.y == epoch && a.w == epoch;
}
__device__ __forceinline__ uint2 await_packet(const uint8_t *from, uint32_t epoch) {
    uint2 w;
    do w = load_packet(from);
    while (w.y != epoch);
    return w;
}

// The packet of an operand's element.
__device__ __forceinline__ const uint8_t *added_at(const Place &p, int64_t at) { return reinterpret_cast<const uint8_t *>(p.packets) + (p.format == PK_F32 ? at * 8 : at / 2 * 8); }

// Writes an element to memory and to whoever waits for it. All lanes of a warp call it, with neighbours side by side.
__device__ __forceinline__ void write_output(const Place p, int64_t at, float v, bool is_valid, uint32_t epoch) {
    // Two formats only: code that is not there does not have to be fetched, which costs a trip to L2 behind the weights.
    if (is_valid && p.data) {
        if (p.format == PK_F32) {
            reinterpret_cast<float *>(p.data)[at] = v;
        } else {
            reinterpret_cast<bf16 *>(p.data)[at] = __float2bfloat16(v);
        }
    }
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

// Byte `which` of four words.
template <int kWhich>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr uint32_t kPair = (4 + kWhich) << 4 | kWhich;
    return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

// Eight elements of a block of 32, whose others the neighbouring three lanes hold. With q the element over the block's scale,
// rounded, q + 128 stands in the mantissa after one addition: its second byte is the high byte of q, its first one, turned
// around, the low byte, both signed.
template <int kRows>
__device__ __forceinline__ void put_integers(uint8_t *xs, float *scales, const float *v, int piece, int row, bool is_bytes) {
    float most = fabsf(v[0]), first = (v[0] + v[1]) + (v[2] + v[3]), second = (v[4] + v[5]) + (v[6] + v[7]);
#pragma unroll
    for (int i = 1; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    first += __shfl_xor_sync(~0u, first, 1);
    second += __shfl_xor_sync(~0u, second, 1);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    first += __shfl_xor_sync(~0u, first, 2);
    second += __shfl_xor_sync(~0u, second, 2);
    const float inverse = most > 1e-30f ? __fdividef(kMostInteger, most) : 0.0f;
    uint32_t q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.0f + 128.0f));
    const int block = piece >> 2, c = piece & 3;
    uint8_t *to = xs + (block * kRows + row) * 64 + c * 8;
    // The order in which a lane's codes lie in the words of a unit.
    const uint32_t b = is_bytes ? q[2] : q[4], d = is_bytes ? q[3] : q[5], e = is_bytes ? q[4] : q[2], g = is_bytes ? q[5] : q[3];
    *reinterpret_cast<uint2 *>(to) = make_uint2(gather_bytes<1>(q[0], b, q[1], d), gather_bytes<1>(e, q[6], g, q[7]));
    *reinterpret_cast<uint2 *>(to + 32) = make_uint2(gather_bytes<0>(q[0], b, q[1], d) ^ 0x80808080u, gather_bytes<0>(e, q[6], g, q[7]) ^ 0x80808080u);
    if (c == 0) *reinterpret_cast<float4 *>(scales + (block * kRows + row) * 4) = make_float4(most * (1.0f / kMostInteger), first, second, 0.0f);
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

// Stages part `part` of every row. kNorm: x is F32 and normed, otherwise BF16 and taken as it is. rms: kWarps floats of shared
// memory; rows: which row of x each row is.
template <int kRows, bool kInteger, bool kNorm>
__device__ __forceinline__ void stage(const Phase &p, const Arguments &a, int at, uint8_t *xs, float *rms, const int *rows, int part, int n_rows, uint32_t base) {
    constexpr int kWarpsRow = kWarps / kRows, kPerRow = 32 * kWarpsRow, kKept = kNorm ? 1 : 3, kBytes = kNorm ? 8 : 4;
    constexpr int kApart = kPerRow * 8 * kBytes, kHalf = (kInteger ? 16 : 4) * kBytes;  // bytes from piece to piece of a thread, and between its halves
    const int tid = threadIdx.x, row = tid / kPerRow, mine = tid % kPerRow, warp = tid >> 5;
    const bool is_row = row < n_rows;
    const uint32_t epoch = base + p.x.source + 1;
    const int count = p.part_k, pieces = count >> 3, all = p.k >> 3, first_piece = part * pieces;
    const uint8_t *x = packet_at<kNorm>(p.x.packets, (p.is_gathered && is_row ? rows[row] : row) * p.x.stride + first_of<kInteger>(mine));
    const float *weights = p.norm + first_of<kInteger>(mine);
    bf16 *normed = p.normed.data && is_row && row == static_cast<int>(blockIdx.x) ? reinterpret_cast<bf16 *>(p.normed.data) + row * p.normed.stride + first_of<kInteger>(mine) : nullptr;
    const int staging = p.staging, x_row = x_row_bytes(staging, count);
    float *scales = reinterpret_cast<float *>(xs + kRows * x_row);
    float v[kKept][8], w[kNorm ? kKept : 1][8];
    // Pieces first + j * kPerRow + mine below `end`, counted from x.
    auto load = [&](int first, int end) {
        bool ok;
        do {
            ok = true;
#pragma unroll
            for (int j = 0; j < kKept; ++j) {
                const uint8_t *from = x + static_cast<int64_t>(first) * (8 * kBytes) + j * kApart;
                if (is_row && first + j * kPerRow + mine < end) {
                    ok &= load4<kNorm>(from, epoch, v[j]);
                    ok &= load4<kNorm>(from + kHalf, epoch, v[j] + 4);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e) v[j][e] = 0.0f;
                }
            }
            // Not there yet: one lane asks, many would be in the way of the weights.
            if (!__all_sync(~0u, ok)) {
                if ((tid & 31) == 0) await_packet(x + static_cast<int64_t>(first) * (8 * kBytes), epoch);
                __syncwarp();
            }
        } while (!__all_sync(~0u, ok));
    };
    auto load_norm = [&](int first) {
        if constexpr (kNorm) {
#pragma unroll
            for (int j = 0; j < kKept; ++j) {
                if (first + j * kPerRow + mine >= all) continue;
                *reinterpret_cast<float4 *>(w[j]) = __ldg(reinterpret_cast<const float4 *>(weights + first * 8 + j * kPerRow * 8));
                *reinterpret_cast<float4 *>(w[j] + 4) = __ldg(reinterpret_cast<const float4 *>(weights + first * 8 + j * kPerRow * 8 + (kInteger ? 16 : 4)));
            }
        }
    };
    float factor = 1.0f;
    const bool is_kept = kNorm && p.n_parts == 1 && all <= kKept * kPerRow;
    if constexpr (kNorm) {
        const float inverse_k = p.inverse_k, eps = p.eps;
        if (is_kept) load_norm(0);
        float s = 0.0f;
        for (int first = 0; first < all; first += kKept * kPerRow) {
            load(first, all);
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) s += v[j][e] * v[j][e];
        }
        mark(a, at, 1);
        s = warp_sum(s);
        if ((tid & 31) == 0) rms[warp] = s;
        join_consumers(kConsumers);
        mark(a, at, 2);
        s = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarpsRow; ++i) s += rms[(row < kRows ? row : 0) * kWarpsRow + i];
        factor = rsqrtf(s * inverse_k + eps);
    }
    if (row >= kRows) return;  // whole warps
    for (int first = 0; first < pieces; first += kKept * kPerRow) {
        if (!is_kept) {
            load(first_piece + first, first_piece + pieces);
            if (!kNorm) mark(a, at, 1);
            load_norm(first_piece + first);
        }
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int i = first + j * kPerRow + mine;
            if (i - (mine & 31) >= pieces) break;  // whole warps
            if (kNorm && i < pieces) {
#pragma unroll
                for (int e = 0; e < 8; ++e) v[j][e] *= factor * w[j][e];
                if (normed != nullptr) {
                    uint2 *to = reinterpret_cast<uint2 *>(normed + (first_piece + first + j * kPerRow) * 8);
                    to[0] = make_uint2(pack_bf16(v[j][0], v[j][1]), pack_bf16(v[j][2], v[j][3]));
                    to[kInteger ? 4 : 1] = make_uint2(pack_bf16(v[j][4], v[j][5]), pack_bf16(v[j][6], v[j][7]));
                }
            }
            if constexpr (kInteger) {
                put_integers<kRows>(xs, scales, v[j], i, row, staging == kStageBytes);
            } else {
                if (i < pieces) put_bf16(xs + row * x_row, v[j], i, staging == kStageFp8);
            }
        }
    }
}

}  // namespace pk::persist
