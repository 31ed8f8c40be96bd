// Products of the experts' stacks with sorted pairs, one translation unit per weight format (PK_EXPERT_FORMAT).
//
// Few pairs: up to eight pairs of one expert stand on the N side of mma.sync m16n8k16, weights on the M side straight from
// registers in their stored form; scales are applied to sums of their group, so nothing is rounded on the way. The warps of a
// block split K. Many pairs: 128 x 128 tiles; each warp decodes its 16 rows of W into swizzled shared memory one stage ahead of
// the products: as bf16, or (FP4) as codes and scales in order. x: F32 or BF16 (tiles: BF16, 16-byte rows, or rows of fp4.cuh).
#include <algorithm>

#include "../../include/experts_piece.cuh"
#include "../../include/fp4.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

// ---- few pairs ----

// Grid: any. Tasks are the groups of rows of all items, dealt out evenly: a block takes neighbours, and what it reads next is on its way
// over the borders of items. Shared: x [count, n_units * kU], sums of up to two tiles of eight pairs, partial sums of the warps.
template <int kFormat>
__global__ void __launch_bounds__(kExpertThreads, 2) expert_stream_kernel(const __grid_constant__ ExpertProduct p) {
    using P = PieceOf<kFormat>;
    constexpr int kMostTiles = P::kU <= 128 ? 2 : 1;
    extern __shared__ __align__(128) uint8_t shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wk = warp % p.warps_k, wm = warp / p.warps_k, warps_m = 8 / p.warps_k;
    const bool is_gated = p.n_w == 2, has_units = wk < p.n_units;
    const int out_rows = is_gated ? 16 : 32, group_rows = out_rows * warps_m, n_groups = (p.n_rows + group_rows - 1) / group_rows;
    const int sums_floats = P::kHasSums ? p.n_units * P::kU / P::kGroup * 8 : 0;
    wait_dependence();
    release_dependents();
    const int64_t n_tasks = static_cast<int64_t>(items_of(p)) * n_groups;
    int task = static_cast<int>(n_tasks * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(n_tasks * (blockIdx.x + 1) / gridDim.x);
    if (task >= end) return;

    typename P::Registers regs[2];
    float block_scale[2] = {1.0f, 1.0f};
    auto row_of = [&](int group, int t) { return p.first_row + (group * warps_m + wm) * out_rows + (is_gated ? 0 : t * 16); };
    auto load = [&](int place, int group, int unit, int t) {
        const ExpertWeight &w = p.w[is_gated ? t : 0];
        const uint8_t *matrix = w.data + place * w.stride;
        const int row0 = min(row_of(group, t), w.padded_rows - 16);
        P::load(regs[t], w, matrix, row0, unit, p.n_units, lane);
        if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) block_scale[t] = block_scale_of(w, matrix, row0, unit);
    };
    int index = task / n_groups;
    ExpertItem item = item_of(p, index);
    if (has_units) {
        load(item.place, task - index * n_groups, wk, 0);
        load(item.place, task - index * n_groups, wk, 1);
    }
    for (;;) {
        const uint8_t *matrix[2] = {p.w[0].data + item.place * p.w[0].stride, p.w[is_gated].data + item.place * p.w[is_gated].stride};
        const float scales[2] = {*reinterpret_cast<const float *>(matrix[0] + p.w[0].scale_at), *reinterpret_cast<const float *>(matrix[1] + p.w[is_gated].scale_at)};
        const int n_tiles = (item.count + 7) >> 3;
        uint8_t *xs = shared;
        float *sums = reinterpret_cast<float *>(xs + item.count * p.x_row_bytes), *red = sums + n_tiles * sums_floats;
        stage_x<kFormat>(p, item, xs);
        __syncthreads();
        if constexpr (P::kHasSums) {
            for (int q = 0; q < n_tiles; ++q)
                stage_sums<kFormat>(p, ExpertItem{item.expert, item.first + 8 * q, min(8, item.count - 8 * q), item.place}, xs + 8 * q * p.x_row_bytes, sums + q * sums_floats);
            __syncthreads();
        }
        // Lanes past the pairs read one that is there; their columns are never stored.
        const uint8_t *x_lane[kMostTiles];
#pragma unroll
        for (int q = 0; q < kMostTiles; ++q) x_lane[q] = xs + (8 * q + (lane >> 2) < item.count ? 8 * q + (lane >> 2) : 0) * p.x_row_bytes + (lane & 3) * 16;
        const int until = min(end, (index + 1) * n_groups);
        const ExpertItem next = until < end ? item_of(p, index + 1) : item;
        for (; task < until; ++task) {
            const int group = task - index * n_groups;
            float acc[kMostTiles][2][4] = {};
            for (int u = wk; u < p.n_units; u += p.warps_k) {
                const bool is_last = u + p.warps_k >= p.n_units, is_across = is_last && task + 1 == until;
                const bool is_more = !is_across || until < end;
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    multiply<kFormat>(regs[t], acc[0][t], x_lane[0] + u * P::kU * 2, sums + u * (P::kU / P::kGroup) * 8 + 2 * (lane & 3), block_scale[t]);
                    if constexpr (kMostTiles == 2)
                        if (n_tiles == 2) multiply<kFormat>(regs[t], acc[1][t], x_lane[1] + u * P::kU * 2, sums + sums_floats + u * (P::kU / P::kGroup) * 8 + 2 * (lane & 3), block_scale[t]);
                    if (is_more) load(is_across ? next.place : item.place, is_across ? 0 : is_last ? group + 1 : group, is_last ? wk : u + p.warps_k, t);
                }
            }
#pragma unroll
            for (int q = 0; q < kMostTiles; ++q) {
                if (q == n_tiles) break;
                __syncthreads();
                float *mine = red + warp * 32 * kRed;
#pragma unroll
                for (int t = 0; t < 2; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) mine[(t * 16 + (lane >> 2) + 8 * (i >> 1)) * kRed + 2 * (lane & 3) + (i & 1)] = acc[q][t][i];
                __syncthreads();
                for (int j = threadIdx.x; j < min(8, item.count - 8 * q) * group_rows; j += kExpertThreads) {
                    const int in_group = j % group_rows, n = j / group_rows, m = in_group / out_rows, in = in_group % out_rows;
                    const int local = group * group_rows + in_group, row = p.first_row + local;
                    if (local >= p.n_rows) continue;
                    const int64_t at = (item.first + 8 * q + n) * p.out_stride + local;
                    float first = 0.0f, second = 0.0f;
                    for (int k = 0; k < p.warps_k; ++k) {
                        const float *part = red + ((m * p.warps_k + k) * 32 + in) * kRed + n;
                        first += part[0];
                        if (is_gated) second += part[16 * kRed];
                    }
                    float v = finish(p.w[0], matrix[0], scales[0], item.expert, row, first);
                    if (is_gated) v = gated(p, v, finish(p.w[1], matrix[1], scales[1], item.expert, row, second));
                    if (p.gate != nullptr) v = gated(p, load_as_f32(p.gate, at, p.out_format), v);
                    if (p.act == PK_ACT_RELU2) v = activate(v, PK_ACT_RELU2);
                    store_from_f32(p.out, at, p.out_format, v);
                }
            }
        }
        if (task >= end) return;
        ++index;
        item = next;
        __syncthreads();
    }
}

// ---- many pairs ----

constexpr int kStageK = 64, kStageBytes = kTileRows * kStageK * 2, kXStages = 3;

__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Decodes 64 elements (part `part` of the unit) of 16 rows into a tile of bf16. row(r): the tile's row of row r.
template <int kFormat, int kPart, class Row>
__device__ __forceinline__ void decode(const typename PieceOf<kFormat>::Registers &u, uint8_t *tile, int lane, float block_scale, const Row &row) {
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = row(r + 8 * half);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            if constexpr (is_block_format(kFormat)) {
                float v[8];
                unit_values<Unit<kFormat>>(u, 2 * kPart + b, half, v);
                const uint4 packed = pack8(v);
                *reinterpret_cast<uint2 *>(tile + tile_offset(at, 4 * b + (c >> 1)) + (c & 1) * 8) = make_uint2(packed.x, packed.y);
                *reinterpret_cast<uint2 *>(tile + tile_offset(at, 4 * b + 2 + (c >> 1)) + (c & 1) * 8) = make_uint2(packed.z, packed.w);
            } else {
                uint32_t codes[4];
                rows_codes<kFormat, 0>(u, 2 * kPart + b, half, codes);
                if constexpr (Rows<kFormat>::kIsFp8) {
                    uint32_t pairs[4];
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        pairs[i] = __byte_perm(codes[i], codes[i + 1], 0x5410);
                        pairs[i + 1] = __byte_perm(codes[i], codes[i + 1], 0x7632);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) codes[i] = pack_bf16(low_f32(pairs[i]) * block_scale, high_f32(pairs[i]) * block_scale);
                }
                const int chunk = Rows<kFormat>::kIsFp8 ? 2 * c + b : 4 * b + c;
                *reinterpret_cast<uint4 *>(tile + tile_offset(at, chunk)) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
            }
        }
    }
}

// FP4: a stage is 128 of K. Of x both terms, 128 bytes a row, then the scales; of W 64 bytes a row, then the scales.
__device__ __forceinline__ uint32_t codes_offset(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }

template <int kFormat, class Row>
__device__ __forceinline__ void order(const typename PieceOf<kFormat>::Registers &u, uint8_t *tile, int lane, const Row &row) {
    constexpr int kScaleBytes = Fp4<kFormat>::kScaleBytes;
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = row(r + 8 * half);
        *reinterpret_cast<uint4 *>(tile + codes_offset(at, c)) = fp4_block(u, half);
        if (c < kScaleBytes / 4) *reinterpret_cast<uint32_t *>(tile + kTileRows * 64 + at * kScaleBytes + 4 * c) = fp4_scales<kFormat>(u, half, c);
    }
}

// acc as in end_products below.
template <int kFormat>
__device__ __forceinline__ void multiply_fp4(float (&acc)[64], const uint8_t *x, const uint8_t *x_scales, const uint8_t *w) {
    constexpr int kScaleBytes = Fp4<kFormat>::kScaleBytes;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 1, wn = warp >> 1;
    auto word = [](const uint8_t *scales, int k) {
        return kFormat == PK_MXFP4 ? *reinterpret_cast<const uint32_t *>(scales) >> (16 * k) : *reinterpret_cast<const uint32_t *>(scales + 4 * k);
    };
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        uint32_t right[2][4], w_scales[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) load_matrix4(right[n], shared_address(w) + codes_offset(wn * 32 + n * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
#pragma unroll
        for (int n = 0; n < 4; ++n) w_scales[n] = word(w + kTileRows * 64 + (wn * 32 + n * 8 + (lane >> 2)) * kScaleBytes, k);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                uint32_t left[4];
                load_matrix4(left, shared_address(x) + tile_offset(wm * 64 + m * 16 + (lane & 15), 4 * term + 2 * k + (lane >> 4)));
                const uint32_t scales = word(x_scales + ((wm * 64 + m * 16 + 8 * (lane & 1) + (lane >> 2)) * kTerms + term) * kScaleBytes, k);
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    mma_e2m1<kFormat>(*reinterpret_cast<float(*)[4]>(&acc[4 * (4 * m + n)]), left, right[n >> 1][(n & 1) * 2], right[n >> 1][(n & 1) * 2 + 1], scales, w_scales[n]);
            }
    }
}

#ifdef PK_WGMMA
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

// The products of one stage: acc[4 (4 m + n) + e] of mma.sync m16n8k16 (8 warps of 64 x 32), or the fragment of a warpgroup of
// wgmma m64n128 (two of them, 64 pairs each). Between the two calls lies no branch: with one, ptxas would wait after every wgmma.
__device__ __forceinline__ void begin_products(float (&acc)[64], uint32_t x, uint32_t w) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const uint32_t mine = x + (threadIdx.x >> 7) * (kStageBytes / 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageK / 16; ++k) wgmma_bf16_n128(acc, matrix_descriptor(mine + 32 * k), matrix_descriptor(w + 32 * k), 1);
    wgmma_commit();
#endif
}
__device__ __forceinline__ void end_products(float (&acc)[64], uint32_t x, uint32_t w) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    wgmma_wait<0>();
#else
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 1, wn = warp >> 1;
#pragma unroll
    for (int k = 0; k < kStageK / 16; ++k) {
        uint32_t left[4][4], right[2][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) load_matrix4(left[m], x + tile_offset(wm * 64 + m * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 2; ++n) load_matrix4(right[n], w + tile_offset(wn * 32 + n * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
                mma_bf16(*reinterpret_cast<float(*)[4]>(&acc[4 * (4 * m + n)]), left[m][0], left[m][1], left[m][2], left[m][3], right[n >> 1][(n & 1) * 2], right[n >> 1][(n & 1) * 2 + 1]);
    }
#endif
}

// Pair and column of acc[4 i]; acc[4 i + e] is e / 2 * 8 pairs and e % 2 columns further.
__device__ __forceinline__ int pair_of(int i) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return kHopper ? warp * 16 + (lane >> 2) : (warp & 1) * 64 + (i >> 2) * 16 + (lane >> 2);
}
__device__ __forceinline__ int column_of(int i) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return kHopper ? i * 8 + 2 * (lane & 3) : (warp >> 1) * 32 + (i & 3) * 8 + 2 * (lane & 3);
}

// Grid: items, tiles of W's rows (64 outputs with two weights). With two weights groups of eight rows alternate, so that a thread
// holds gate and up of the same outputs.
template <int kFormat, bool kFp4>
__global__ void __launch_bounds__(kExpertThreads, kHopper ? 2 : 1) expert_tiles_kernel(const __grid_constant__ ExpertProduct p) {
    using P = PieceOf<kFormat>;
    constexpr int kParts = kFp4 ? 1 : P::kU / kStageK;
    extern __shared__ __align__(128) uint8_t shared[];
    wait_dependence();
    release_dependents();
    const ExpertItem item = item_of(p, blockIdx.x);
    if (item.count == 0) return;
    const bool is_gated = p.n_w == 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tid = threadIdx.x;
    const int out_rows = is_gated ? kTileRows / 2 : kTileRows, n0 = p.first_row + blockIdx.y * out_rows;
    const int side = is_gated ? warp & 1 : 0, in_side = is_gated ? warp >> 1 : warp;
    const ExpertWeight &w = p.w[side];
    const uint8_t *matrix = w.data + item.place * w.stride;
    const int row0 = min(n0 + in_side * 16, w.padded_rows - 16);
    uint8_t *xs = shared + (-shared_address(shared) & 1023), *ws = xs + kXStages * kStageBytes;
    auto tile_row = [&](int r) { return is_gated ? (in_side * 2 + (r >> 3)) * 16 + side * 8 + (r & 7) : in_side * 16 + r; };

    // Each thread copies four pieces of x a stage: rows tid / 8 + 32 h, piece tid % 8.
    const uint8_t *xp[4];
    const int chunk = tid & 7;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
        const int row = (tid >> 3) + 32 * h;
        xp[h] = row < item.count ? static_cast<const uint8_t *>(p.x) + x_row_of(p, item.first + row) * p.x_stride * 2 : nullptr;
    }
    auto copy_x = [&](int step) {
        const uint32_t at = shared_address(xs) + (step % kXStages) * kStageBytes;
        const int k = step * kStageK + chunk * 8;
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const bool in = k < (kFp4 ? p.n_units * kStageK : p.k) && xp[h] != nullptr;
            copy16_async(at + tile_offset((tid >> 3) + 32 * h, chunk), in ? xp[h] + k * 2 : p.x, in);
        }
        if constexpr (kFp4) {
            // One of eight threads copies the scales of each row.
            constexpr int kBytes = kTerms * Fp4<kFormat>::kScaleBytes;
            const int h = chunk & 3;
            const uint8_t *from = h == 0 ? xp[0] : h == 1 ? xp[1] : h == 2 ? xp[2] : xp[3];
            const int width = p.n_units * kStageK;
            const bool in = k < width && from != nullptr;
            if (chunk < 4) copy_async<kBytes>(shared_address(ws) + 2 * kStageBytes + ((step % kXStages) * kTileRows + (tid >> 3) + 32 * h) * kBytes, in ? from + width * 2 + step * kBytes : p.x, in);
        }
        commit_async();
    };
    typename P::Registers regs;
    float block_scale = 1.0f;
    auto load = [&](int unit) {
        unit = min(unit, p.n_units - 1);  // past the end: loaded and decoded once more, multiplied by nothing
        P::load(regs, w, matrix, row0, unit, p.n_units, lane);
        if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) block_scale = block_scale_of(w, matrix, row0, unit);
    };
    float acc[64] = {};
    load(0);
    copy_x(0);
    copy_x(1);
    if constexpr (kFp4) order<kFormat>(regs, ws, lane, tile_row);
    else decode<kFormat, 0>(regs, ws, lane, block_scale, tile_row);
    if constexpr (kParts == 1) load(1);
    auto step = [&]<int kPart>(int u) {
        constexpr int kNext = (kPart + 1) % kParts;
        const int s = u * kParts + kPart;
        const uint32_t xt = shared_address(xs) + (s % kXStages) * kStageBytes, wt = shared_address(ws) + (s & 1) * kStageBytes;
        wait_async<kXStages - 2>();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        fence_async_proxy();
#endif
        __syncthreads();
        if constexpr (!kFp4) begin_products(acc, xt, wt);
        copy_x(s + 2);
        if constexpr (kFp4) order<kFormat>(regs, ws + ((s + 1) & 1) * kStageBytes, lane, tile_row);
        else decode<kFormat, kNext>(regs, ws + ((s + 1) & 1) * kStageBytes, lane, block_scale, tile_row);
        if constexpr (kNext == kParts - 1) load(u + 1 + (kParts == 1));
        if constexpr (kFp4) multiply_fp4<kFormat>(acc, xs + (s % kXStages) * kStageBytes, ws + 2 * kStageBytes + (s % kXStages) * kTileRows * kTerms * Fp4<kFormat>::kScaleBytes, ws + (s & 1) * kStageBytes);
        else end_products(acc, xt, wt);
    };
    for (int u = 0; u < p.n_units; ++u) {
        step.template operator()<0>(u);
        if constexpr (kParts > 1) step.template operator()<1>(u);
        if constexpr (kParts > 2) {
            step.template operator()<2>(u);
            step.template operator()<3>(u);
        }
    }
    const uint8_t *first = p.w[0].data + item.place * p.w[0].stride, *second = is_gated ? p.w[1].data + item.place * p.w[1].stride : first;
    const float scales[2] = {*reinterpret_cast<const float *>(first + p.w[0].scale_at), *reinterpret_cast<const float *>(second + p.w[is_gated].scale_at)};
    const bool is_plain = p.w[0].row_scale_at < 0 && p.w[0].bias == nullptr && (!is_gated || (p.w[1].row_scale_at < 0 && p.w[1].bias == nullptr));
    const int end = p.first_row + p.n_rows, end_local = max(p.padded_out, p.n_rows);
    const bool is_paired = (p.out_stride & 1) == 0 && (end_local & 1) == 0;
    auto value = [&](int row, float gate, float up, int64_t at) {
        if (row >= end) return 0.0f;
        float v = is_plain ? gate * scales[0] : finish(p.w[0], first, scales[0], item.expert, row, gate);
        if (is_gated) v = gated(p, v, is_plain ? up * scales[1] : finish(p.w[1], second, scales[1], item.expert, row, up));
        if (p.act == PK_ACT_RELU2) return activate(v, PK_ACT_RELU2);
        return p.gate != nullptr ? gated(p, load_as_f32(p.gate, at, p.out_format), v) : v;
    };
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (is_gated && (i & 1)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pair = pair_of(i) + 8 * half, c = column_of(i), row = n0 + (is_gated ? (c >> 4) * 8 + (c & 7) : c), local = row - p.first_row;
            if (pair >= item.count || local >= end_local) continue;
            const int64_t at = (item.first + pair) * p.out_stride + local;
            const int e = 4 * i + 2 * half, f = 4 * (i | 1) + 2 * half;
            if constexpr (kFp4) {
                const float factor = p.x_factors[x_row_of(p, item.first + pair)];
                for (int j : {e, e + 1}) acc[j] *= factor;
                if (is_gated)
                    for (int j : {f, f + 1}) acc[j] *= factor;
            }
            const float a = value(row, acc[e], acc[f], at), b = value(row + 1, acc[e + 1], acc[f + 1], at + 1);
            if (is_paired && p.out_format == PK_BF16) {
                *reinterpret_cast<uint32_t *>(static_cast<bf16 *>(p.out) + at) = pack_bf16(a, b);
            } else if (is_paired) {
                *reinterpret_cast<float2 *>(static_cast<float *>(p.out) + at) = make_float2(a, b);
            } else {
                store_from_f32(p.out, at, p.out_format, a);
                if (local + 1 < end_local) store_from_f32(p.out, at + 1, p.out_format, b);
            }
        }
    }
}

}  // namespace

template <int kFormat>
int32_t launch_expert_stream(const Launch &l, const ExpertProduct &p, int32_t max_items, int64_t shared_bytes) {
    const int32_t group_rows = (p.n_w == 2 ? 16 : 32) * (8 / p.warps_k);
    const int64_t most = static_cast<int64_t>((p.n_rows + group_rows - 1) / group_rows) * max_items;
    return launch(l, "expert_stream", expert_stream_kernel<kFormat>, dim3(static_cast<unsigned>(std::min<int64_t>(most, 2 * l.ctx->n_processors))), dim3(kExpertThreads), shared_bytes, p);
}

template <int kFormat>
int32_t launch_expert_tiles(const Launch &l, const ExpertProduct &p, int32_t max_items) {
    const int32_t out_rows = p.n_w == 2 ? kTileRows / 2 : kTileRows;
    const dim3 grid(max_items, (p.n_rows + out_rows - 1) / out_rows), block(kExpertThreads);
    constexpr int64_t kBytes = (kXStages + 2) * kStageBytes + 1024;
    if constexpr (kFp4Built && (kFormat == PK_MXFP4 || kFormat == PK_NVFP4))
        if (p.x_factors != nullptr) return launch(l, "expert_tiles", expert_tiles_kernel<kFormat, true>, grid, block, kBytes + kXStages * kTileRows * kTerms * Fp4<kFormat>::kScaleBytes, p);
    return launch(l, "expert_tiles", expert_tiles_kernel<kFormat, false>, grid, block, kBytes, p);
}

template int32_t launch_expert_stream<PK_EXPERT_FORMAT>(const Launch &, const ExpertProduct &, int32_t, int64_t);
template int32_t launch_expert_tiles<PK_EXPERT_FORMAT>(const Launch &, const ExpertProduct &, int32_t);

}  // namespace pk
