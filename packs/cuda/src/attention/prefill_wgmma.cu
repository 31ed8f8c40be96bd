// Paged attention on Hopper for rows of many tokens (FlashAttention-3 form): out[t, h] = softmax(scale q.k) v over the pages.
//
// An item is (row, KV head, tile of 128 (token, head) pairs). One producer warpgroup fills rings of K and V tiles in shared
// memory: by tensor copies, a box a page, where the pages allow it, else by loads that convert. Two consumer warpgroups of
// 64 pairs each take turns on the tensor cores (one computes weights while the other multiplies), and the scores of a tile
// are asked for before the weighted values of the tile before it. O is rescaled only when a row's largest logit grew by
// more than 2^kSlack. Tiles go from the last position to the first. Grid: persistent. Head widths: TMA 64, 128, 192, 256;
// others padded. KV: BF16, F16 by copies; F32, FP8 converted. FP8 and F16 multiply as f16, others as bf16. Does not
// handle: rows that is_decode_row() gives to decode. Source of the schedule: Shah et al. 2024 (FlashAttention-3).
#include "../../include/attention_tiles.cuh"
#include "../../include/wgmma_attention.cuh"

namespace pk {

namespace {

#ifndef PK_PING_PONG
#define PK_PING_PONG 1
#endif
#ifndef PK_SLACK
#define PK_SLACK 8.0f
#endif
constexpr int kThreads = 384, kPairs = 128, kStages = 2;
constexpr float kSlack = PK_SLACK;
template <int kD>
constexpr int kTile = kD <= 128 ? 128 : 64;
template <int kD>
constexpr int kQBuffers = kD <= 128 ? 2 : 1;

struct Maps {
    CUtensorMap k, v;
};

// Offset of a piece of eight elements: blocks of 8 rows x 64 columns, swizzled.
template <int kD>
__device__ __forceinline__ uint32_t block_offset(int row, int piece) {
    return (row >> 3) * (kD / 64 * 1024) + (piece >> 3) * 1024 + (row & 7) * 128 + (((piece ^ row) & 7) << 4);
}

template <int kD>
constexpr int kQBytes = kPairs * kD * 2;
template <int kD>
constexpr int kPartBytes = kTile<kD> * kD * 2;
template <int kD>
constexpr int kRingAt = kQBuffers<kD> * kQBytes<kD>;
template <int kD>
constexpr int kEndsAt = kRingAt<kD> + 2 * kStages * kPartBytes<kD>;

struct Barriers {
    uint64_t q_full[2], q_empty[2], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], edge;
};

// A position in a ring of n buffers: which one, and the parity of its use.
template <int kN>
struct Turn {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == kN) {
            at = 0;
            parity ^= 1;
        }
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ int nth_item(int n) { return n * gridDim.x + ((n & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

// The first position of an item's tiles, and their number. Pages are not cut by tiles.
template <int kD>
__device__ __forceinline__ int first_of_tiles(const AttentionArguments &a, const TileItem &item) {
    const int whole = min(a.page_tokens, kTile<kD>);
    return a.page_shift >= 0 ? item.kv_first & ~(whole - 1) : item.kv_first;
}

template <bool kHalf>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
    if constexpr (kHalf) {
        const __half2 v = __floats2half2_rn(x, y);
        return *reinterpret_cast<const uint32_t *>(&v);
    } else {
        return pack_bf16(x, y);
    }
}

template <bool kHalf>
__device__ __forceinline__ uint4 to_math(uint4 v) {  // eight bf16
    if constexpr (kHalf)
        return make_uint4(pack2<true>(low_f32(v.x), high_f32(v.x)), pack2<true>(low_f32(v.y), high_f32(v.y)), pack2<true>(low_f32(v.z), high_f32(v.z)), pack2<true>(low_f32(v.w), high_f32(v.w)));
    else
        return v;
}

// Q of an item into a buffer, by kN threads of which this is thread `i`.
template <int kD, bool kHalf, int kN>
__device__ __forceinline__ void load_q(const AttentionArguments &a, const TileItem &item, uint8_t *to, int i) {
    constexpr int kPieces = kD / 8;
    const int group = a.n_heads / a.n_kv_heads;
    const bool wide = a.q_format == PK_BF16 && a.q_stride % 8 == 0 && a.head_width % 8 == 0 && reinterpret_cast<uintptr_t>(a.q) % 16 == 0;
#pragma unroll 4
    for (int j = i; j < kPairs * kPieces; j += kN) {
        const int row = j / kPieces, piece = j % kPieces, pair = item.first_pair + row;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (pair < item.n_pairs && piece * 8 < a.head_width) {
            const int64_t from = static_cast<int64_t>(item.start + pair / group) * a.q_stride + (item.head * group + pair % group) * a.head_width + piece * 8;
            if (wide)
                v = *reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(a.q) + from);
            else
                v = make_uint4(load_q_pair(a, from), load_q_pair(a, from + 2), load_q_pair(a, from + 4), load_q_pair(a, from + 6));
        }
        *reinterpret_cast<uint4 *>(to + block_offset<kD>(row, piece)) = to_math<kHalf>(v);
    }
}

// Eight elements of K or V in the format of the products.
template <bool kHalf>
__device__ __forceinline__ uint4 load_kv8_as(const uint8_t *base, int64_t element, int32_t format) {
    if constexpr (kHalf) {
        if (format == PK_F16) return *reinterpret_cast<const uint4 *>(base + element * 2);
        const uint2 w = *reinterpret_cast<const uint2 *>(base + element);
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>((i < 2 ? w.x : w.y) >> (16 * (i & 1)) & 0xffff), __NV_E4M3);
            out[i] = *reinterpret_cast<const uint32_t *>(&h);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    } else {
        return load_kv8(base, element, format);
    }
}

// One tile of K or V by 128 threads that convert. Positions outside [row_first, row_end) become zeros.
template <int kD, bool kHalf>
__device__ void load_tile(const AttentionArguments &a, const TileItem &item, int first, bool is_v, uint8_t *to, int i) {
    constexpr int kPieces = kD / 8, kPer = kTile<kD> * kPieces / 128, kBatch = kPer % 8 ? 4 : 8;
    const int width = is_v ? a.v_width : a.head_width;
    const int64_t offset = is_v ? a.v_offset : a.k_offset;
#pragma unroll 1
    for (int j = 0; j < kPer; j += kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int k = (j + b) * 128 + i, row = k / kPieces, piece = k % kPieces, p = first + row;
            v[b] = make_uint4(0, 0, 0, 0);
            if (p >= item.row_first && p < item.kv_end && piece * 8 < width) {
                const int page = page_of(a, p);
                const uint8_t *base = a.kv + static_cast<int64_t>(item.pages[page]) * a.page_stride + offset;
                v[b] = load_kv8_as<kHalf>(base, (static_cast<int64_t>(item.head) * a.page_tokens + p - page * a.page_tokens) * width + piece * 8, a.kv_format);
            }
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int k = (j + b) * 128 + i;
            *reinterpret_cast<uint4 *>(to + block_offset<kD>(k / kPieces, k % kPieces)) = v[b];
        }
    }
}

template <int kD, bool kHalf>
__device__ void produce_converted(const AttentionArguments &a, uint8_t *shared, const int *ends, Barriers &b, int n_tiles) {
    Turn<kQBuffers<kD>> q;
    Turn<kStages> k, v;
    const int tid = threadIdx.x;
    for (int n = 0, index; (index = nth_item(n)) < n_tiles * a.n_kv_heads || n * gridDim.x < n_tiles * a.n_kv_heads; ++n) {
        if (index >= n_tiles * a.n_kv_heads) continue;
        const TileItem item = find_tile<kPairs>(a, ends, n_tiles, index);
        const int first = first_of_tiles<kD>(a, item), n_steps = (item.kv_end - first + kTile<kD> - 1) / kTile<kD>;
        barrier_wait(&b.q_empty[q.at], q.parity ^ 1);
        load_q<kD, kHalf, 128>(a, item, shared + q.at * kQBytes<kD>, tid);
        fence_async_proxy();
        barrier_arrive(&b.q_full[q.at]);
        q.next();
        for (int step = 0; step <= n_steps; ++step) {
            if (step < n_steps) {
                barrier_wait(&b.k_empty[k.at], k.parity ^ 1);
                load_tile<kD, kHalf>(a, item, first + (n_steps - 1 - step) * kTile<kD>, false, shared + kRingAt<kD> + k.at * kPartBytes<kD>, tid);
                fence_async_proxy();
                barrier_arrive(&b.k_full[k.at]);
                k.next();
            }
            if (step > 0) {
                barrier_wait(&b.v_empty[v.at], v.parity ^ 1);
                load_tile<kD, kHalf>(a, item, first + (n_steps - step) * kTile<kD>, true, shared + kRingAt<kD> + (kStages + v.at) * kPartBytes<kD>, tid);
                fence_async_proxy();
                barrier_arrive(&b.v_full[v.at]);
                v.next();
            }
        }
    }
}

// Warp 0: boxes of pages. A lane a page; lanes' page numbers are asked for one tile ahead.
template <int kD>
__device__ void produce_copied(const AttentionArguments &a, const Maps &maps, uint8_t *shared, const int *ends, Barriers &b, int n_tiles) {
    constexpr int kT = kTile<kD>;
    Turn<kStages> k, v;
    uint32_t edge = 0;
    const int lane = threadIdx.x, rows = min(a.page_tokens, kT), n_boxes = kT / rows;
    for (int n = 0, index; (index = nth_item(n)) < n_tiles * a.n_kv_heads || n * gridDim.x < n_tiles * a.n_kv_heads; ++n) {
        if (index >= n_tiles * a.n_kv_heads) continue;
        const TileItem item = find_tile<kPairs>(a, ends, n_tiles, index);
        const int first = first_of_tiles<kD>(a, item), n_steps = (item.kv_end - first + kT - 1) / kT;
        const int page_first = item.row_first >> a.page_shift, page_last = (item.row_end - 1) >> a.page_shift;
        auto page_at = [&](int step) {  // of this lane's box in the tile of a step
            const int p = first + max(n_steps - 1 - step, 0) * kT + lane * rows;
            return lane < n_boxes ? item.pages[min(max(p >> a.page_shift, page_first), page_last)] : 0;
        };
        auto box = [&](int tile_first, int page, const CUtensorMap *map, uint32_t to, uint64_t *barrier) {
            const int p = tile_first + lane * rows;
            if (lane < n_boxes) copy_page(to + lane * rows * kD * 2, map, (item.head * a.page_tokens + (p & (a.page_tokens - 1))) >> 3, page, barrier);
        };
        int page = page_at(0), page_before = 0;
        for (int step = 0; step <= n_steps; ++step) {
            const int page_next = page_at(step + 1);
            if (step < n_steps) {
                barrier_wait(&b.k_empty[k.at], k.parity ^ 1);
                if (lane == 0) barrier_expect(&b.k_full[k.at], kPartBytes<kD>);
                __syncwarp();
                box(first + (n_steps - 1 - step) * kT, page, &maps.k, shared_address(shared) + kRingAt<kD> + k.at * kPartBytes<kD>, &b.k_full[k.at]);
                k.next();
            }
            if (step > 0) {
                const int tile_first = first + (n_steps - step) * kT;
                // Unwritten values may be no numbers, which no weight of zero cancels: they become zeros.
                const bool is_edge = tile_first < item.row_first || tile_first + kT > item.row_end;
                uint64_t *barrier = is_edge ? &b.edge : &b.v_full[v.at];
                barrier_wait(&b.v_empty[v.at], v.parity ^ 1);
                if (lane == 0) barrier_expect(barrier, kPartBytes<kD>);
                __syncwarp();
                const int v_at = kRingAt<kD> + (kStages + v.at) * kPartBytes<kD>;
                box(tile_first, page_before, &maps.v, shared_address(shared) + v_at, barrier);
                if (is_edge) {
                    barrier_wait(barrier, edge);
                    edge ^= 1;
                    for (int r = 0; r < kT; ++r) {
                        if (tile_first + r >= item.row_first && tile_first + r < item.row_end) continue;
                        if (lane < kD / 8) *reinterpret_cast<uint4 *>(shared + v_at + block_offset<kD>(r, lane)) = make_uint4(0, 0, 0, 0);
                    }
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&b.v_full[v.at]);
                }
                v.next();
            }
            page_before = page;
            page = page_next;
        }
    }
}

// Warps 1 to 3 beside produce_copied.
template <int kD, bool kHalf>
__device__ void produce_q(const AttentionArguments &a, uint8_t *shared, const int *ends, Barriers &b, int n_tiles) {
    Turn<kQBuffers<kD>> q;
    for (int n = 0, index; (index = nth_item(n)) < n_tiles * a.n_kv_heads || n * gridDim.x < n_tiles * a.n_kv_heads; ++n) {
        if (index >= n_tiles * a.n_kv_heads) continue;
        const TileItem item = find_tile<kPairs>(a, ends, n_tiles, index);
        barrier_wait(&b.q_empty[q.at], q.parity ^ 1);
        load_q<kD, kHalf, 96>(a, item, shared + q.at * kQBytes<kD>, threadIdx.x - 32);
        fence_async_proxy();
        barrier_arrive(&b.q_full[q.at]);
        q.next();
    }
}

// What a consumer thread keeps of its two pairs.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];
    int limit[2];

    // Raw scores become weights (base 2 of scores times c minus the top).
    template <int kN>
    __device__ __forceinline__ void apply(float (&s)[kN], float c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -INFINITY;
#pragma unroll
            for (int t = 0; t < kN / 4; ++t) most = fmaxf(most, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            most *= c;
            const float next = most > top[h] + kSlack ? most : top[h], base = next == -INFINITY ? 0.0f : next;
            fade[h] = power2(top[h] - base);
            top[h] = next;
            float part[2] = {0.0f, 0.0f};
#pragma unroll
            for (int t = 0; t < kN / 4; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &x = s[4 * t + 2 * h + e];
                    x = power2(fmaf(x, c, -base));
                    part[e] += x;
                }
            sum[h] = sum[h] * fade[h] + part[0] + part[1];
        }
    }
    template <int kN>
    __device__ __forceinline__ void rescale(float (&o)[kN]) const {
        if (!__any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kN; ++i) o[i] *= fade[(i >> 1) & 1];
    }
};

template <int kN>
__device__ __forceinline__ void mask_tile(float (&s)[kN], const int (&limit)[2], int window, int first) {
    const int column = first + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int high = limit[h] - column, low = window > 0 ? high - window : -1 << 30;
#pragma unroll
        for (int t = 0; t < kN / 4; ++t)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (t * 8 + e > high || t * 8 + e <= low) s[4 * t + 2 * h + e] = -INFINITY;
    }
}

template <int kD, bool kHalf>
__device__ __forceinline__ void scores(float (&s)[kTile<kD> / 2], uint32_t q_at, uint32_t k_at) {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
        const int in = (k >> 2) * 1024 + (k & 3) * 32;
        if constexpr (kHalf)
            wgmma_scores_f16(s, block_descriptor<kD / 64>(q_at + in), block_descriptor<kD / 64>(k_at + in), k > 0);
        else
            wgmma_scores_bf16(s, block_descriptor<kD / 64>(q_at + in), block_descriptor<kD / 64>(k_at + in), k > 0);
    }
    wgmma_commit();
}

template <int kD, bool kHalf>
__device__ __forceinline__ void values(float (&o)[kD / 2], const uint32_t (&p)[kTile<kD> / 16][4], uint32_t v_at) {
#pragma unroll
    for (int t = 0; t < kTile<kD> / 16; ++t) {
        if constexpr (kHalf)
            wgmma_values_f16(o, p[t], block_descriptor<kD / 64>(v_at + t * 2 * (kD / 64) * 1024));
        else
            wgmma_values_bf16(o, p[t], block_descriptor<kD / 64>(v_at + t * 2 * (kD / 64) * 1024));
    }
    wgmma_commit();
}

// O of this warp's 16 pairs goes through the warp's rows of the Q buffer `stage`, so that rows are written whole.
template <int kD>
__device__ __forceinline__ void store_tile(const AttentionArguments &a, const TileItem &item, int warp, Softmax &m, const float (&o)[kD / 2], uint8_t *stage) {
    const int group = a.n_heads / a.n_kv_heads, lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + (lane >> 2) + 8 * h;
        m.sum[h] += __shfl_xor_sync(~0u, m.sum[h], 1);
        m.sum[h] += __shfl_xor_sync(~0u, m.sum[h], 2);
        const float f = last_factor(a, item.head * group + (item.first_pair + row) % group, m.top[h], m.sum[h]);
#pragma unroll
        for (int d = 0; d < kD / 8; ++d)
            *reinterpret_cast<uint32_t *>(stage + block_offset<kD>(row, d) + 4 * (lane & 3)) = pack_bf16(o[4 * d + 2 * h] * f, o[4 * d + 2 * h + 1] * f);
    }
    __syncwarp();
    const bool wide = a.out_format == PK_BF16 && a.out_stride % 8 == 0 && a.v_width % 8 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
#pragma unroll 1
    for (int i = lane; i < 16 * kD / 8; i += 32) {
        const int row = warp * 16 + i / (kD / 8), piece = i % (kD / 8), pair = item.first_pair + row;
        if (pair >= item.n_pairs || piece * 8 >= a.v_width) continue;
        const uint4 v = *reinterpret_cast<const uint4 *>(stage + block_offset<kD>(row, piece));
        const int64_t to = static_cast<int64_t>(item.start + pair / group) * a.out_stride + static_cast<int64_t>(item.head * group + pair % group) * a.v_width + piece * 8;
        if (wide) {
            *reinterpret_cast<uint4 *>(static_cast<bf16 *>(a.out) + to) = v;
        } else {
            store_out_pair(a, to, low_f32(v.x), high_f32(v.x));
            store_out_pair(a, to + 2, low_f32(v.y), high_f32(v.y));
            store_out_pair(a, to + 4, low_f32(v.z), high_f32(v.z));
            store_out_pair(a, to + 6, low_f32(v.w), high_f32(v.w));
        }
    }
    __syncwarp();
}

template <int kD, bool kHalf>
__device__ void consume(const AttentionArguments &a, uint8_t *shared, const int *ends, Barriers &b, int n_tiles) {
    constexpr int kT = kTile<kD>;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - 4, team = warp >> 2, group = a.n_heads / a.n_kv_heads;
    const bool plain = a.softcap <= 0.0f && a.scale > 0.0f;
    const float c = plain ? a.scale * kLog2e : 1.0f;
    Turn<kQBuffers<kD>> q;
    Turn<kStages> k, v;
    if (PK_PING_PONG && team == 1) named_arrive<256>(2);
    for (int n = 0, index; (index = nth_item(n)) < n_tiles * a.n_kv_heads || n * gridDim.x < n_tiles * a.n_kv_heads; ++n) {
        if (index >= n_tiles * a.n_kv_heads) continue;
        const TileItem item = find_tile<kPairs>(a, ends, n_tiles, index);
        const int first = first_of_tiles<kD>(a, item), n_steps = (item.kv_end - first + kT - 1) / kT;
        const int team_first = item.first_pair + team * 64, last_pair = item.n_pairs - 1;
        Softmax m;
#pragma unroll
        for (int h = 0; h < 2; ++h) m.limit[h] = item.position + min(item.first_pair + warp * 16 + (lane >> 2) + 8 * h, last_pair) / group;
        // Tiles between these positions need no mask.
        const int least = item.position + min(team_first, last_pair) / group, most = item.position + min(team_first + 63, last_pair) / group;
        auto weights = [&](float(&s)[kT / 2], int step) {
            const int at = first + (n_steps - 1 - step) * kT;
            if (!plain) logits2<kT / 2>(s, a.scale, a.softcap);
            if (at + kT - 1 > least || (a.window > 0 && at <= most - a.window)) mask_tile(s, m.limit, a.window, at);
            m.apply(s, c);
        };
        float o[kD / 2], s[kT / 2];
        uint32_t p[kT / 16][4];
        auto pack = [&] {
#pragma unroll
            for (int t = 0; t < kT / 16; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[t][e] = pack2<kHalf>(s[8 * t + 2 * e], s[8 * t + 2 * e + 1]);
        };
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) o[i] = 0.0f;
        const uint32_t q_at = shared_address(shared) + q.at * kQBytes<kD> + team * 64 * kD * 2;
        const uint32_t k_ring = shared_address(shared) + kRingAt<kD>, v_ring = k_ring + kStages * kPartBytes<kD>;
        barrier_wait(&b.q_full[q.at], q.parity);
        barrier_wait(&b.k_full[k.at], k.parity);
        wgmma_fence();
        scores<kD, kHalf>(s, q_at, k_ring + k.at * kPartBytes<kD>);
        wgmma_wait<0>();
        settle(s);
        if ((threadIdx.x & 127) == 0) barrier_arrive(&b.k_empty[k.at]);
        k.next();
        weights(s, 0);
        pack();
#pragma unroll 1
        for (int step = 1; step < n_steps; ++step) {
            barrier_wait(&b.k_full[k.at], k.parity);
            if (PK_PING_PONG) named_wait<256>(2 + team);
            wgmma_fence();
            scores<kD, kHalf>(s, q_at, k_ring + k.at * kPartBytes<kD>);
            barrier_wait(&b.v_full[v.at], v.parity);
            wgmma_fence();
            values<kD, kHalf>(o, p, v_ring + v.at * kPartBytes<kD>);
            if (PK_PING_PONG) named_arrive<256>(3 - team);
            wgmma_wait<1>();
            settle(s);
            if ((threadIdx.x & 127) == 0) barrier_arrive(&b.k_empty[k.at]);
            k.next();
            weights(s, step);
            wgmma_wait<0>();
            settle(o);
            if ((threadIdx.x & 127) == 0) barrier_arrive(&b.v_empty[v.at]);
            v.next();
            m.rescale(o);
            pack();
        }
        barrier_wait(&b.v_full[v.at], v.parity);
        wgmma_fence();
        values<kD, kHalf>(o, p, v_ring + v.at * kPartBytes<kD>);
        wgmma_wait<0>();
        settle(o);
        if ((threadIdx.x & 127) == 0) barrier_arrive(&b.v_empty[v.at]);
        v.next();
        named_wait<128>(4 + team);
        store_tile<kD>(a, item, warp, m, o, shared + q.at * kQBytes<kD>);
        if (lane == 0) barrier_arrive(&b.q_empty[q.at]);
        q.next();
    }
}

#endif

template <int kD, bool kHalf, bool kCopy>
__global__ void __launch_bounds__(kThreads, 1) attention_wgmma_kernel(const __grid_constant__ AttentionArguments a, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t raw[];
    uint8_t *shared = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    __shared__ Barriers b;
    __shared__ int warps[kThreads / 32];
    __shared__ int total;
    int *ends = reinterpret_cast<int *>(shared + kEndsAt<kD>);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(&b.q_full[i], kCopy ? 96 : 128);
            barrier_init(&b.q_empty[i], 8);
        }
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&b.k_full[i], kCopy ? 1 : 128);
            barrier_init(&b.v_full[i], kCopy ? 1 : 128);
            barrier_init(&b.k_empty[i], 2);
            barrier_init(&b.v_empty[i], 2);
        }
        barrier_init(&b.edge, 1);
        fence_async_proxy();
    }
    wait_dependence();
    release_dependents();
    const int n_tiles = schedule_tiles<kThreads, kPairs>(a, ends, warps, &total);
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<kCopy ? 40 : 72>();
        if constexpr (!kCopy)
            produce_converted<kD, kHalf>(a, shared, ends, b, n_tiles);
        else if (threadIdx.x < 32)
            produce_copied<kD>(a, maps, shared, ends, b, n_tiles);
        else
            produce_q<kD, kHalf>(a, shared, ends, b, n_tiles);
    } else {
        more_registers<kCopy ? 232 : 216>();
        consume<kD, kHalf>(a, shared, ends, b, n_tiles);
    }
#endif
}

// Boxes are whole pages, or tiles of a longer page; false when the pages do not lie as the copies need them.
template <int kD>
bool make_maps(const Launch &l, const AttentionArguments &a, Maps *maps) {
    if (a.head_width != kD || a.v_width != kD || (a.kv_format != PK_BF16 && a.kv_format != PK_F16) || a.page_shift < 3) return false;
    const uint64_t bytes = kD * 2, rows = static_cast<uint64_t>(a.page_tokens < kTile<kD> ? a.page_tokens : kTile<kD>);
    const cuuint64_t size[5] = {64, 8, kD / 64, static_cast<cuuint64_t>(a.n_kv_heads) * a.page_tokens / 8, 1u << 30};
    const cuuint64_t stride[4] = {bytes, 128, 8 * bytes, static_cast<cuuint64_t>(a.page_stride)};
    const cuuint32_t box[5] = {64, 8, kD / 64, static_cast<cuuint32_t>(rows / 8), 1}, step[5] = {1, 1, 1, 1, 1};
    for (int part = 0; part < 2; ++part) {
        uint8_t *base = const_cast<uint8_t *>(a.kv) + (part ? a.v_offset : a.k_offset);
        if (l.ctx->driver.encode_tiled(part ? &maps->v : &maps->k, a.kv_format == PK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, base, size, stride, box, step,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
            return false;
    }
    return true;
}

}  // namespace

template <int kD>
int32_t launch_attention_wgmma(const Launch &l, const AttentionArguments &a) {
    const int64_t bytes = 1024 + kEndsAt<kD> + a.max_rows * 4;
    const dim3 grid(l.ctx->n_processors), block(kThreads);
    const bool half = a.kv_format == PK_F16 || a.kv_format == PK_FP8_E4M3;
    Maps maps;
    if (make_maps<kD>(l, a, &maps))
        return half ? launch(l, "attention prefill", attention_wgmma_kernel<kD, true, true>, grid, block, bytes, a, maps)
                    : launch(l, "attention prefill", attention_wgmma_kernel<kD, false, true>, grid, block, bytes, a, maps);
    return half ? launch(l, "attention prefill", attention_wgmma_kernel<kD, true, false>, grid, block, bytes, a, maps)
                : launch(l, "attention prefill", attention_wgmma_kernel<kD, false, false>, grid, block, bytes, a, maps);
}
template int32_t launch_attention_wgmma<PK_WIDTH>(const Launch &l, const AttentionArguments &a);

}  // namespace pk
