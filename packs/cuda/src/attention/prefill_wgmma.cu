// Paged attention on Hopper for rows of many tokens (FlashAttention-3 form): out[t, h] = softmax(scale q.k) v over the pages.
//
// An item is (row, KV head, tile of 128 (token, head) pairs). One producer warpgroup fills rings of K and V tiles in shared
// memory: by tensor copies, a box a page, where the pages allow it, else by loads that convert. Two consumer warpgroups of
// 64 pairs each take turns on the tensor cores (one computes weights while the other multiplies), and the scores of a tile
// are asked for before the weighted values of the tile before it. O is rescaled only when a row's largest logit grew by
// more than 2^kSlack. Tiles go from the last position to the first. Grid: persistent. Head widths: TMA 64, 128, 192, 256;
// others padded. KV: BF16, F16 by copies; FP8 by copies of its bytes, which are widened; F32 converted. FP8 and F16 multiply as f16, others as bf16. Does not
// handle: rows that is_decode_row() gives to decode. A second use: items of shared prefixes, whose pairs are those of many rows
// of one token; they leave partial sums that decode.cu joins with the rows' own positions. Source of the schedule: Shah et al. 2024 (FlashAttention-3).
#include "../../include/attention_hopper.cuh"

namespace pk {

namespace {

using namespace hopper;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a consumer thread keeps of its two pairs.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];

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
    const uint32_t q = block_base(q_at), b = block_base(k_at);
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
        const int in = (k >> 2) * 1024 + (k & 3) * 32;
        if constexpr (kHalf)
            wgmma_scores_f16(s, block_descriptor<kD / 64>(q, in), block_descriptor<kD / 64>(b, in), k > 0);
        else
            wgmma_scores_bf16(s, block_descriptor<kD / 64>(q, in), block_descriptor<kD / 64>(b, in), k > 0);
    }
    wgmma_commit();
}

template <int kD, bool kHalf>
__device__ __forceinline__ void values(float (&o)[kD / 2], const uint32_t (&p)[kTile<kD> / 16][4], uint32_t v_at, int accumulate) {
    const uint32_t b = block_base(v_at);
#pragma unroll
    for (int t = 0; t < kTile<kD> / 16; ++t) {
        if constexpr (kHalf)
            wgmma_values_f16(o, p[t], block_descriptor<kD / 64>(b, t * 2 * (kD / 64) * 1024), t > 0 ? 1 : accumulate);
        else
            wgmma_values_bf16(o, p[t], block_descriptor<kD / 64>(b, t * 2 * (kD / 64) * 1024), t > 0 ? 1 : accumulate);
    }
    wgmma_commit();
}

// O of this warp's 16 pairs goes through `stage`, 64 columns at a time, so that rows are written in whole lines.
template <int kD>
__device__ __forceinline__ void store_tile(const AttentionArguments &a, const TileItem &item, int warp, const float (&top)[2], const float (&sum)[2], const float (&o)[kD / 2], uint8_t *stage) {
    const int group = a.n_heads / a.n_kv_heads, lane = threadIdx.x & 31;
    const int64_t mine = row_of_pair(a, item, item.first_pair + warp * 16 + (lane & 15), a.out_stride, a.v_width);
    const bool wide = a.out_format == PK_BF16 && a.out_stride % 8 == 0 && a.v_width % 8 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
        all += __shfl_xor_sync(~0u, all, 2);
        if (item.members != nullptr || item.is_piece) {
            const int pair = item.first_pair + warp * 16 + (lane >> 2) + 8 * h;
            if (pair >= item.n_pairs) continue;
            const int64_t row = item.part + pair;
            if ((lane & 3) == 0) a.share_ml[row] = make_float2(top[h], all);
#pragma unroll
            for (int d = 0; d < kD / 8; ++d) *reinterpret_cast<float2 *>(a.share_part + row * kD + 8 * d + 2 * (lane & 3)) = make_float2(o[4 * d + 2 * h], o[4 * d + 2 * h + 1]);
            continue;
        }
        f[h] = last_factor(a, a.sinks || a.gains ? item.head * group + (item.first_pair + warp * 16 + (lane >> 2) + 8 * h) % group : 0, top[h], all);
    }
    if (item.members != nullptr || item.is_piece) return;
#pragma unroll
    for (int panel = 0; panel < kD / 64; ++panel) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int d = 0; d < 8; ++d)
                *reinterpret_cast<uint32_t *>(stage + block_offset<64>((lane >> 2) + 8 * h, d) + 4 * (lane & 3)) = pack_bf16(o[4 * (8 * panel + d) + 2 * h] * f[h], o[4 * (8 * panel + d) + 2 * h + 1] * f[h]);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 128; i += 32) {
            const int row = i >> 3, column = panel * 64 + (i & 7) * 8;
            const uint4 v = *reinterpret_cast<const uint4 *>(stage + block_offset<64>(row, i & 7));
            const int64_t begin = __shfl_sync(~0u, mine, row), to = begin + column;
            if (begin < 0 || column >= a.v_width) continue;
            if (wide) {
                *reinterpret_cast<uint4 *>(static_cast<bf16 *>(a.out) + to) = v;
            } else {
                const bf16 *from = reinterpret_cast<const bf16 *>(stage + block_offset<64>(row, i & 7));
#pragma unroll 1
                for (int e = 0; e < 8; ++e) store_from_f32(a.out, to + e, a.out_format, __bfloat162float(from[e]));
            }
        }
        __syncwarp();
    }
}

// What a consumer thread needs to know of an item while it makes weights.
struct View {
    int first, n_steps, least, most;  // of its tiles; positions that every pair of the warpgroup sees, and that some pair sees
    int limit[2];

    template <int kD>
    __device__ __forceinline__ void open(const AttentionArguments &a, const TileItem &item, int warp) {
        const int group = a.n_heads / a.n_kv_heads, last = item.n_pairs - 1, team_first = item.first_pair + (warp >> 2) * 64, row = (threadIdx.x & 31) >> 2;
        first = first_of_tiles<kD>(a, item);
        n_steps = (item.kv_end - first + kTile<kD> - 1) / kTile<kD>;
        if (item.members != nullptr) {
            least = most = limit[0] = limit[1] = item.kv_end - 1;
            return;
        }
        least = item.position + min(team_first, last) / group;
        most = item.position + min(team_first + 63, last) / group;
#pragma unroll
        for (int h = 0; h < 2; ++h) limit[h] = item.position + min(item.first_pair + warp * 16 + row + 8 * h, last) / group;
    }
};

// The scores of a step run beside the weighted values of the step before it, over the borders of items.
template <int kD, bool kHalf, bool kCap, int kQ>
__device__ void consume(const AttentionArguments &a, uint8_t *shared, Barriers &b, const TileItem *items, int n_items) {
    constexpr int kT = kTile<kD>;
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (threadIdx.x >> 5) - 4, 0), team = warp >> 2;
    const float c = kCap ? 1.0f : a.scale * kLog2e;
    const uint32_t q_ring = shared_address(shared) + team * 64 * kD * 2, k_ring = shared_address(shared) + kRingAt<kD>, v_ring = k_ring + kStages * kPartBytes<kD>;
    uint8_t *stage = shared + kStageAt<kD> + warp * 2048;
    const bool is_first = (threadIdx.x & 127) == 0;
    RingTurn<kQ> q;
    RingTurn<kStages> k, v;
    float o[kD / 2], s[kT / 2];
    uint32_t p[kT / 16][4];
    Softmax m;
    View view = {};
    auto weights = [&](int step) {
        const int at = view.first + (view.n_steps - 1 - step) * kT;
        if constexpr (kCap) logits2<kT / 2>(s, a.scale, a.softcap);
        if (at + kT - 1 > view.least || (a.window > 0 && at <= view.most - a.window)) mask_tile(s, view.limit, a.window, at);
        m.apply(s, c);
    };
    auto pack = [&] {
#pragma unroll
        for (int t = 0; t < kT / 16; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[t][e] = pack2<kHalf>(s[8 * t + 2 * e], s[8 * t + 2 * e + 1]);
    };
    auto scored = [&](int step) {
        settle(s);
        if (is_first) {
            barrier_arrive(&b.k_empty[k.stage]);
            if (step == view.n_steps - 1) barrier_arrive(&b.q_empty[q.stage]);
        }
        k.advance();
    };
    if (n_items == 0) return;
    if (team == 1) named_arrive<256>(2);
    barrier_wait(&b.q_full[0], 0);
    view.open<kD>(a, items[0], warp);
    barrier_wait(&b.k_full[0], 0);
    wgmma_fence();
    scores<kD, kHalf>(s, q_ring, k_ring);
    wgmma_wait<0>();
    scored(0);
    weights(0);
    pack();
    int n = 0, step = 0, accumulate = 0;  // the first values of an item replace O
#pragma unroll 1
    for (;;) {
        const bool ends = step == view.n_steps - 1;
        const float top[2] = {m.top[0], m.top[1]}, sum[2] = {m.sum[0], m.sum[1]};
        ++step;
        if (ends) {
            if (++n == n_items) break;
            q.advance();
            barrier_wait(&b.q_full[q.stage], q.phase);
            view.open<kD>(a, items[n % kItems], warp);
            m = Softmax();
            step = 0;
        }
        barrier_wait(&b.k_full[k.stage], k.phase);
        named_wait<256>(2 + team);
        wgmma_fence();
        scores<kD, kHalf>(s, q_ring + q.stage * kQBytes<kD>, k_ring + k.stage * kPartBytes<kD>);
        barrier_wait(&b.v_full[v.stage], v.phase);
        wgmma_fence();
        values<kD, kHalf>(o, p, v_ring + v.stage * kPartBytes<kD>, accumulate);
        named_arrive<256>(3 - team);
        wgmma_wait<1>();
        scored(step);
        weights(step);
        // The assembler would wait first: a branch that needs the weights keeps them before the wait. (No sum is negative.)
        if (m.sum[0] + m.sum[1] < 0.0f) asm volatile("trap;");
        wgmma_wait<0>();
        settle(o);
        if (is_first) barrier_arrive(&b.v_empty[v.stage]);
        v.advance();
        if (ends) {
            store_tile<kD>(a, items[(n - 1) % kItems], warp, top, sum, o, stage);
        } else {
            m.rescale(o);
        }
        accumulate = !ends;
        pack();
    }
    barrier_wait(&b.v_full[v.stage], v.phase);
    wgmma_fence();
    values<kD, kHalf>(o, p, v_ring + v.stage * kPartBytes<kD>, accumulate);
    wgmma_wait<0>();
    settle(o);
    store_tile<kD>(a, items[(n - 1) % kItems], warp, m.top, m.sum, o, stage);
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kStaged: FP8 whose bytes come into a stage first.
template <int kD, bool kHalf, bool kCopy, bool kCap, bool kStaged>
__device__ __forceinline__ void attend(const AttentionArguments &a, const Maps &maps, const Beside &beside) {
    extern __shared__ uint8_t raw[];
    uint8_t *shared = raw + (-shared_address(raw) & 1023);  // not by way of a number: the compiler would take it for any memory
    __shared__ Barriers b;
    __shared__ TileItem items[kItems];
    __shared__ int warps[kThreads / 32];
    __shared__ int total;
    __shared__ Counts counts;
    __shared__ Pieces pieces;
    int *ends = reinterpret_cast<int *>(shared + kEndsAt<kD>);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(&b.q_full[i], kCopy ? 96 : 128);
            barrier_init(&b.q_empty[i], 2);
        }
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&b.k_full[i], kCopy ? 1 : 128);
            barrier_init(&b.v_full[i], kCopy ? 1 : 128);
            barrier_init(&b.k_empty[i], 2);
            barrier_init(&b.v_empty[i], 2);
        }
        for (int i = 0; i < 2; ++i) barrier_init(&b.raw[i], 1);
        barrier_init(&b.edge, 1);
        for (int i = 0; i < kItems; ++i) barrier_init(&b.item_full[i], 1);
        fence_async_proxy();
    }
    Work work = {ends, 0, &counts, nullptr};
    int n_blocks = gridDim.x;
    if (a.share_head != nullptr) {
        wait_dependence();
        release_dependents();
        work.n_tiles = schedule_shared(a, ends, warps, &total);
    } else {
        release_dependents();  // decode's blocks: they wait for what is in front as these do
        work.n_tiles = schedule_rows<kThreads, kPairs, kTile<kD>>(a, ends, warps, &total, pieces);
        n_blocks = pieces.load.prefill_blocks<kD, kTile<kD>>(a, n_blocks, a.n_kv_heads * (a.head_width + a.v_width) * (a.kv_format == PK_F32 ? 4 : a.kv_format == PK_FP8_E4M3 ? 1 : 2));
        if (cut_tiles<kThreads, kPairs>(a, work.n_tiles, n_blocks, beside.max_parts, pieces)) work.pieces = &pieces;
    }
    __syncthreads();
    int n_mine = 0;
    const bool is_spare = static_cast<int>(blockIdx.x) >= n_blocks;
    if (!is_spare && work.pieces != nullptr)
        n_mine = list_places(pieces, a.n_kv_heads, n_blocks);
    else if (!is_spare)
        while (nth_of_whole(n_mine, n_blocks) < n_whole(a, work)) ++n_mine;
    if (a.share_head == nullptr) {
        if (is_spare || (n_mine == 0 && work.pieces == nullptr && blockIdx.x > 0)) return;  // its multiprocessor is decode's
        wait_dependence();
        if (blockIdx.x == 0 && threadIdx.x == 0) tell(beside);
    }
    if (threadIdx.x == 0) {
        counts = {n_mine, n_blocks};
        if (work.pieces == nullptr) pieces.n_parts = 0;
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<kCopy ? 56 : 72>();
        if constexpr (kStaged)
            produce_widened<kD>(a, maps, shared, work, b, items);
        else if constexpr (!kCopy)
            produce_converted<kD, kHalf>(a, shared, work, b, items);
        else if (threadIdx.x < 32)
            produce_copied<kD>(a, maps, shared, b, items, counts.n_items);
        else
            produce_q<kD, kHalf>(a, shared, work, b, items);
    } else {
        more_registers<kCopy ? 224 : 216>();
        consume<kD, kHalf, kCap, kStaged ? 1 : kQBuffers<kD>>(a, shared, b, items, counts.n_items);
        if (pieces.n_parts > 0) join_pieces<kPairs, kD, 8>(a, pieces, beside.words + 2, counts.n_blocks, (threadIdx.x >> 5) - 4);
    }
}

#endif

template <int kD, bool kHalf, bool kCap>
__global__ void __launch_bounds__(kThreads, 1) attention_wgmma_kernel(const __grid_constant__ AttentionArguments a, const __grid_constant__ Maps maps, Beside beside) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend<kD, kHalf, true, kCap, false>(a, maps, beside);
#endif
}
// For K and V that tensor copies cannot bring.
template <int kD, bool kHalf, bool kStaged>
__global__ void __launch_bounds__(kThreads, 1) attention_converting_kernel(const __grid_constant__ AttentionArguments a, const __grid_constant__ Maps maps, Beside beside) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend<kD, kHalf, false, true, kStaged>(a, maps, beside);
#endif
}

// Boxes are whole pages, or tiles of a longer page; false when the pages do not lie as the copies need them.
template <int kD>
bool make_maps(const Launch &l, const AttentionArguments &a, Maps *maps) {
    const bool is_fp8 = a.kv_format == PK_FP8_E4M3;
    if (a.head_width != kD || a.v_width != kD || a.page_shift < 3 || (is_fp8 ? !kHasStage<kD> : a.kv_format != PK_BF16 && a.kv_format != PK_F16)) return false;
    const uint64_t bytes = kD * 2, rows = static_cast<uint64_t>(a.page_tokens < kTile<kD> ? a.page_tokens : kTile<kD>), all_rows = static_cast<uint64_t>(a.n_kv_heads) * a.page_tokens;
    const cuuint64_t size[5] = {64, 8, kD / 64, all_rows / 8, 1u << 30}, raw_size[3] = {kD, all_rows, 1u << 30};
    const cuuint64_t stride[4] = {bytes, 128, 8 * bytes, static_cast<cuuint64_t>(a.page_stride)}, raw_stride[2] = {kD, static_cast<cuuint64_t>(a.page_stride)};
    const cuuint32_t box[5] = {64, 8, kD / 64, static_cast<cuuint32_t>(rows / 8), 1}, raw_box[3] = {kD, static_cast<cuuint32_t>(rows), 1}, step[5] = {1, 1, 1, 1, 1};
    for (int part = 0; part < 2; ++part) {
        uint8_t *base = const_cast<uint8_t *>(a.kv) + (part ? a.v_offset : a.k_offset);
        CUtensorMap *map = part ? &maps->v : &maps->k;
        const auto encode = l.ctx->driver.encode_tiled;
        const CUresult e = is_fp8 ? encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, base, raw_size, raw_stride, raw_box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
                                  : encode(map, a.kv_format == PK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, base, size, stride, box, step,
                                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return false;
    }
    return true;
}

}  // namespace

template <int kD>
int32_t launch_attention_wgmma(const Launch &l, const AttentionArguments &a, const Beside &beside) {
    const int64_t bytes = 1024 + kEndsAt<kD> + a.max_rows * 4;
    const dim3 grid(l.ctx->n_processors), block(kThreads);
    const bool half = a.kv_format == PK_F16 || a.kv_format == PK_FP8_E4M3;
    const bool cap = a.softcap > 0.0f || a.scale <= 0.0f;
    Maps maps = {};
    auto start = [&](auto kernel) { return launch(l, "attention prefill", kernel, grid, block, bytes, a, maps, beside); };
    if (!make_maps<kD>(l, a, &maps)) return half ? start(attention_converting_kernel<kD, true, false>) : start(attention_converting_kernel<kD, false, false>);
    if (a.kv_format == PK_FP8_E4M3) return start(attention_converting_kernel<kD, true, kHasStage<kD>>);
    if (half) return cap ? start(attention_wgmma_kernel<kD, true, true>) : start(attention_wgmma_kernel<kD, true, false>);
    return cap ? start(attention_wgmma_kernel<kD, false, true>) : start(attention_wgmma_kernel<kD, false, false>);
}
template int32_t launch_attention_wgmma<PK_WIDTH>(const Launch &l, const AttentionArguments &a, const Beside &beside);

}  // namespace pk
