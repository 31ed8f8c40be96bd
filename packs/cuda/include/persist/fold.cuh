// x of an integer product, folded by who writes it: the codes that all blocks would make of it otherwise, each for itself.
//
// 32 neighbours are a record of seven packets of 16 bytes, of which four are the epoch: 16 words of codes in the order in which they lie in
// shared memory ([high or low byte][lane % 4][words of a unit], stage.cuh), the scale, the sums of the first and the second 16, and the sum of squares of what the norm is of.
#pragma once
#include "phase.h"
#include "ring.cuh"

namespace pk::persist {

constexpr float kMostInteger = 32512.0f;  // 127 * 256: the low byte may round up

// Word i of 16, of the codes of 32 elements: a lane has kPer neighbours' codes in its low and high half.
template <int kPer>
__device__ __forceinline__ uint32_t folded_word(uint32_t codes, int i, int lane, bool is_bytes) {
    if constexpr (kPer == 1) codes |= __shfl_down_sync(~0u, codes, 1) << 16;
    // The order in which a lane's codes lie in the words of a unit: of nibbles one of each 16 by turns.
    const int c = i >> 1 & 3, in = i & 1, from = 4 * c + (is_bytes ? 16 : 2) * in, other = from + (is_bytes ? 2 : 16), base = kPer == 1 ? 0 : lane & 16;
    const uint32_t a = __shfl_sync(~0u, codes, base + from / kPer), b = __shfl_sync(~0u, codes, base + other / kPer);
    return __byte_perm(a, b, i & 8 ? 0x6240u : 0x7351u);
}

// By whole warps, 32 / kPer lanes a record: kPer neighbours a lane, and the sum of the squares of what they were before the norm's weights.
template <int kPer>
__device__ __forceinline__ void put_folded(uint8_t *record, const float (&v)[kPer], float squares, uint32_t epoch, bool is_bytes) {
    constexpr int kLanes = 32 / kPer;
    const int lane = thread_here() & 31, i = lane & (kLanes - 1);
    float most = fabsf(v[0]), sum = v[0];
#pragma unroll
    for (int k = 1; k < kPer; ++k) {
        most = fmaxf(most, fabsf(v[k]));
        sum += v[k];
    }
    // Of all lanes by one instruction: what comes next waits for it.
    if constexpr (kPer == 1) most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
#pragma unroll
    for (int o = 1; o < kLanes / 2; o <<= 1) {
        if constexpr (kPer > 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        sum += __shfl_xor_sync(~0u, sum, o);
        squares += __shfl_xor_sync(~0u, squares, o);
    }
    if constexpr (kPer > 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, kLanes / 2));
    squares += __shfl_xor_sync(~0u, squares, kLanes / 2);
    const float other = __shfl_xor_sync(~0u, sum, kLanes / 2), inverse = most > 1e-30f ? __fdividef(kMostInteger, most) : 0.0f;
    // With q the element over the scale, rounded, q + 128 stands in the mantissa after one addition: its second byte is the high byte of q, its first
    // one, turned around, the low byte, both signed.
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) codes |= ((__float_as_uint(fmaf(v[k], inverse, 12582912.0f + 128.0f)) & 0xffffu) ^ 0x80u) << 16 * k;
    const uint32_t word = folded_word<kPer>(codes, i & 15, lane, is_bytes);
    uint32_t out[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) out[k] = __shfl_sync(~0u, word, (lane & ~(kLanes - 1)) + (3 * i + k & 15));
    if (i == 5) {
        out[1] = __float_as_uint(most * (1.0f / kMostInteger));
        out[2] = __float_as_uint(sum);
    }
    if (i == 6) {
        out[0] = __float_as_uint(other);
        out[1] = __float_as_uint(squares);
    }
    if (i < kFoldedPackets) store_quad(record + 16 * i, make_uint4(out[0], out[1], out[2], epoch));
}

// For row-major formats, and for integers where tiles by twos would keep blocks longer, four neighbours are a packet of 16 bytes: as BF16, and the sum of squares of what they were before the norm's weights. By whole warps, a neighbour a lane.
__device__ __forceinline__ void put_four(uint8_t *packet, float v, float square, bool is_valid, uint32_t epoch) {
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    const uint32_t pair = pack_bf16(v, __shfl_down_sync(~0u, v, 1)), other = __shfl_down_sync(~0u, pair, 2);
    if (is_valid && (thread_here() & 3) == 0) store_quad(packet, make_uint4(pair, other, __float_as_uint(square), epoch));
}

}  // namespace pk::persist
