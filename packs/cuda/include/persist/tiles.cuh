// Tiles of a weight, chunk by chunk from the ring: what a multiplying warp does between x and the sums that it leaves.
#pragma once
#include "multiply.cuh"
#include "ring.cuh"
#include "stage.cuh"

namespace pk::persist {

// What a warp multiplies: this block's tiles of one weight, gate and up by turns, some of which are added up together.
struct Group {
    int n, most;        // tiles, and of them added up together
    int chunks, from;   // of a tile, and the first one's number
    int x_row;
    bool has_scales;
    const uint8_t *xs;
#ifdef PK_PERSIST_TRACE
    uint32_t waited = 0;
#endif
    __device__ __forceinline__ void await(const Taker &taker, int n) {
#ifdef PK_PERSIST_TRACE
        const uint32_t began = device_time();
#endif
        taker.await_all(n, thread_here() & 31);
#ifdef PK_PERSIST_TRACE
        waited += device_time() - began;
#endif
    }
};

// This warp's chunks of tiles of row-major formats. turn: hands on what lies where it was told, and tells where the next tiles' sums go.
template <int kFormat, class Turn>
__device__ __forceinline__ void multiply_rows(Group &g, Taker &taker, float *to, const Turn &turn) {
    constexpr int kShift = tile_shift(kFormat);
    const int lane = thread_here() & 31;
    RowsProduct<kFormat> product;
    int next = thread_here() >> 5;
#pragma unroll 1
    for (int first = 0; first < g.n; first += g.most) {
        if (first > 0) to = turn();
        const int last = min(first + g.most, g.n);
#pragma unroll 1
        for (int t = first; t < last; ++t, to += 1 << kShift) {
            product.clear();
            const int begin = t * g.chunks, end = begin + g.chunks;
#pragma unroll 1
            for (; next < end; next += kWarps) {
                g.await(taker, 1);
                product.add(taker.slot_at(0), g.xs, g.x_row, next - begin + g.from, g.has_scales, lane);
                __syncwarp();
                taker.release(lane, product.used());
            }
            product.store(to, lane);
        }
    }
}

// Where the two chunks that are multiplied at once lie, from the next slot on, and in how many slots. In parts: the rest of both behind them, or of each behind itself.
template <bool kIsPair>
struct Places {
    int n, second, rest_in[2], rest_at[2];
    __device__ __forceinline__ explicit Places(bool is_parts) {
        second = is_parts && !kIsPair ? 2 : 1;
        n = is_parts ? kIsPair ? 3 : 4 : 2;
        rest_in[0] = !is_parts ? 0 : kIsPair ? 2 : 1;
        rest_in[1] = !is_parts ? 1 : kIsPair ? 2 : 3;
        rest_at[0] = is_parts ? 0 : kFirstBytes;
        rest_at[1] = !is_parts ? kFirstBytes : kIsPair ? kRestBytes : 0;
    }
    // is_single: there is one only, which stands for the other, too. Returns how many slots there are.
    __device__ __forceinline__ int find(const Taker &taker, bool is_single, const uint8_t *(&slot)[2], const uint8_t *(&rest)[2]) const {
        slot[0] = taker.slot_at(0);
        slot[1] = taker.slot_at(is_single ? 0 : second);
        rest[0] = taker.slot_at(rest_in[0]) + rest_at[0];
        rest[1] = is_single ? rest[0] : taker.slot_at(rest_in[1]) + rest_at[1];
        return is_single ? n / 2 : n;
    }
};

// The same of block formats: chunks of two tiles at once, then of a tile left over two at once.
template <int kFormat, class Turn>
__device__ __forceinline__ void multiply_blocks(Group &g, Taker &taker, float *to, const Turn &turn) {
    constexpr int kTile = 16;
    const int lane = thread_here() & 31, chunks = g.chunks;
    const bool is_parts = is_parted(kFormat, taker.slot_bytes);
    int end = 0, next = thread_here() >> 5, left = g.most;
    if (g.n > 1) {
        BlockProduct<kFormat, true> product;
        const Places<true> places(is_parts);
        const int last = g.n / 2 * chunks;
        int at = next;
#pragma unroll 1
        for (; end < last; to += 2 * kTile, left -= 2) {
            if (left == 0) {
                to = turn();
                left = g.most;
            }
            product.clear();
            end += chunks;
#pragma unroll 1
            for (; next < end; next += kWarps, at += kWarps) {
                const uint8_t *slot[2], *rest[2];
                const int n = places.find(taker, false, slot, rest), both[2] = {at + g.from, at + g.from};
                g.await(taker, n);
                product.take(slot, rest, g.xs, g.x_row, both, lane);
                const uint32_t used = product.sums(lane);
                __syncwarp();
                taker.release_all(n, lane, used);
                product.add(lane);
            }
            at -= chunks;
            product.store(to, kTile, lane);
        }
    }
    if (g.n & 1) {
        if (left == 0) to = turn();
        BlockProduct<kFormat, false> product;
        const Places<false> places(is_parts);
        const uint8_t *slot[2], *rest[2];
        product.clear();
        const int begin = end;
        end += chunks;
#pragma unroll 1
        for (; next < end; next += kWarps) {
            const int chunk = next - begin + g.from;
            const bool has_second = next + kWarps < end;
            if (has_second) next += kWarps;
            const int n = places.find(taker, !has_second, slot, rest);
            g.await(taker, n);
            const int both[2] = {chunk, has_second ? chunk + kWarps : chunk};
            product.take(slot, rest, g.xs, g.x_row, both, lane);
            const uint32_t used = product.sums(lane);
            __syncwarp();
            taker.release_all(n, lane, used);
            product.add(lane, has_second);
        }
        product.store(to, 0, lane);
    }
}

template <int kFormat, class Turn>
__device__ __forceinline__ void multiply(Group &g, Taker &taker, float *to, const Turn &turn) {
    if constexpr (is_rows(kFormat)) multiply_rows<kFormat>(g, taker, to, turn);
    else multiply_blocks<kFormat>(g, taker, to, turn);
}

}  // namespace pk::persist
