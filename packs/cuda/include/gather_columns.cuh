// What lanes of fragments (wgmma, mma.sync) hand each other before a row is stored: two columns of every eight become eight neighbours.
#pragma once
#include <cstdint>

namespace pk {

// Pairs of columns, word i of lane c of four neighbours: columns 8i + 2c. Lane c gets the words of columns 8c to 8c + 7.
__device__ __forceinline__ uint4 gather_columns(uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3, int c) {
    const bool odd = c & 1, high = c & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? v0 : v1, 1), b = __shfl_xor_sync(~0u, odd ? v2 : v3, 1);
    const uint32_t w0 = odd ? a : v0, w1 = odd ? v1 : a, w2 = odd ? b : v2, w3 = odd ? v3 : b;
    const uint32_t d = __shfl_xor_sync(~0u, high ? w0 : w2, 2), e = __shfl_xor_sync(~0u, high ? w1 : w3, 2);
    return high ? make_uint4(d, e, w2, w3) : make_uint4(w0, w1, d, e);
}

}  // namespace pk
