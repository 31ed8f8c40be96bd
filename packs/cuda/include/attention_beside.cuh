// Rows of few tokens beside rows of many: decode.cu and prefill_wgmma.cu run at the same time, each on multiprocessors of its own.
//
// Prefill is launched first and lets decode begin at once; decode's blocks fill what prefill's leave free. So decode may not wait for the
// kernel in front of it, but for the one in front of both: the first block of prefill says when that has ended. Who gets how many
// multiprocessors both work out from the step's rows, by the same rule; they need not agree to be right.
#pragma once
#include "attention_share.cuh"

namespace pk {

// Of an op's two launches.
struct Beside {
    int32_t *words;  // the tag once what is in front has ended; blocks of decode that know; two of attention_pieces.cuh. All zero between launches. Null: there is no prefill
    int32_t tag;     // of the op: the next one's decode may begin before this one's has ended
    int32_t max_parts;  // rows of partial sums that prefill's pieces have a place for
};

// Prefill: one thread, behind its wait.
__device__ __forceinline__ void tell(const Beside &b) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(b.words), "r"(b.tag) : "memory"); }
// Decode: one thread of a block; then every thread that asks for copies of what is in front.
__device__ __forceinline__ void wait_told(const Beside &b) {
    int32_t seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(b.words) : "memory");
    while (seen != b.tag);
}
__device__ __forceinline__ void fence_told() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// What a step's rows ask of both kernels. Of every row: add(); then a sum over all.
struct BesideLoad {
    int seen = 0, tiles = 0, steps = 0;  // sixteens of positions that decode reads; prefill's tiles of 128 pairs; 128 pairs x kT positions of them

    template <int kT>
    __device__ __forceinline__ void add(const AttentionArguments &a, int n, int position, int flags, int shared) {
        const int group = a.n_heads / a.n_kv_heads, end = position + n, first = a.window > 0 ? max(0, position - a.window + 1) : 0;
        if (flags & PK_ROW_DEAD) return;
        if (is_decode_row(n, group)) {
            seen += ((end - max(first, shared)) * ((n * group + 15) / 16) + 15) >> 4;
        } else {
            const int here = (n * group + 127) / 128;
            tiles += here;
            steps += here * ((end - first + kT - 1) / kT);
        }
    }
    __device__ __forceinline__ void sum_warp() {
        seen = __reduce_add_sync(~0u, seen);
        tiles = __reduce_add_sync(~0u, tiles);
        steps = __reduce_add_sync(~0u, steps);
    }

    // Multiprocessors that prefill's blocks take, of n; all lanes of a warp, each tries a number. row_bytes: of a position's keys and values, all heads.
    template <int kD, int kT>
    __device__ __forceinline__ int prefill_blocks(const AttentionArguments &a, int n, int row_bytes) const {
        if (seen == 0 || tiles == 0) return n;
        // On an H200, ns: a step; an item beside its steps; before prefill's first item, and what cut tiles take beside their steps; before decode's first keys.
        const float step = (a.kv_format == PK_FP8_E4M3 ? 2700.0f : 1700.0f) * kT * kD / (128 * 128);
        constexpr float kItem = 5200.0f, kBegin = 5500.0f, kPieces = 21000.0f, kDecode = 7500.0f, kOverlap = 2000.0f;
        constexpr float kRate = 3000.0f, kRateOfOne = 42.0f;  // bytes a ns that decode reads at most, and a multiprocessor
        constexpr float kLost = 0.4f;                         // of prefill's time while decode reads
        const float items = static_cast<float>(tiles * a.n_kv_heads), all_steps = static_cast<float>(steps) * a.n_kv_heads, mean = all_steps / items, bytes = 16.0f * seen * row_bytes;
        auto prefill = [&](float blocks) {
            const float whole = kBegin + ceilf(items / blocks) * (kItem + mean * step);
            return mean > 8.0f ? fminf(whole, kPieces + all_steps / blocks * step) : whole;
        };
        auto decode = [&](float blocks) { return kDecode + bytes / fminf(kRate, kRateOfOne * blocks); };
        const int mine = (threadIdx.x & 31) * 4 + 4;
        const float after = prefill(n) + decode(n) - kOverlap, alone = prefill(mine), together = alone + kLost * fminf(alone / (1.0f - kLost), bytes / kRate);
        const float beside = mine < n ? fmaxf(together, decode(n - mine)) : after;
        const int best = __reduce_min_sync(~0u, (static_cast<int>(fminf(beside, 4e8f)) >> 3) << 5 | (threadIdx.x & 31));
        return (best >> 5) << 3 < static_cast<int>(fminf(after, 4e8f)) ? 4 * (best & 31) + 4 : n;
    }
};

}  // namespace pk
