// Paged attention for rows of few tokens: out[t, h] = softmax(scale q.k) v over the pages, KV read once per KV head.
//
// Work is counted in groups of 16 or 32 positions of a (row, KV head, tile of 16 (token, head) pairs); who takes what is in
// attention_even.cuh. What a block has of one of those is a segment. A team of four, two or one warps takes the groups of a segment in
// turn, each warp with a ring of its own that runs on into the next segment: one tensor copy a page and operand on Hopper where pages
// allow it, else cp.async; bytes land as they are stored and FP8 becomes f16 in registers. S and O are mma fragments
// (attention_sums.cuh); the warps join in shared memory. A segment that does not hold its whole (row, head, tile) leaves
// partial sums; the last block to arrive joins them in order, and with them what the row shares with others (share.cu,
// prefill_wgmma.cu): then only the positions after that are read here. Grid: persistent. KV: BF16, F16, FP8 (raw), F32 (converted).
// Blocks begin while the kernels in front still run: rows, page tables and the keys and values of earlier steps are older than those, and
// are read before the wait; q, and K and V of this step's tokens, after it. Beside prefill (attention_beside.cuh) the wait is for what it tells.
// Does not handle: rows that is_decode_row() leaves to prefill.
// Single tokens' rows of heads of 128 may be wanted narrowed to FP8: a warp has a row's head when it ends it.
// A second form (kCut) takes all rows, and its bits for a pair depend on the pair alone: segments are cut at fixed positions
// (attention_cut.cuh), warps take groups by their place in the sequence, sums of segments are joined in order, wherever they are made.
#include <type_traits>

#include "../../include/attention_columns.cuh"
#include "../../include/attention_cut.cuh"
#include "../../include/attention_first.cuh"
#include "../../include/attention_sums.cuh"
#include "../../include/narrow_row.cuh"
#include "../../include/quantise.cuh"

namespace pk {
namespace {

using namespace ring;

// Writes four neighbours of an output row, or as many as the head has.
__device__ __forceinline__ void store4(const AttentionArguments &a, int64_t to, int n, float4 v) {
    if (n >= 4 && a.out_format == PK_BF16 && ((a.out_stride | a.v_width) & 3) == 0 && reinterpret_cast<uintptr_t>(a.out) % 8 == 0) {
        *reinterpret_cast<uint2 *>(static_cast<bf16 *>(a.out) + to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(n, 4); ++i) store_from_f32(a.out, to + i, a.out_format, i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
}

// The end of a pair's sum: the sink joins, the gain counts, the row is written. kNarrows: it goes narrowed, too, where `to` is.
template <bool kNarrows>
__device__ __forceinline__ void finish4(const AttentionArguments &a, const Segment &s, int row, int d, float4 v, float sum, float top, const Narrowed &to) {
    const int group = a.n_heads / a.n_kv_heads, pair = s.pair + row, token = quotient(pair, group), head = s.head * group + pair - token * group;
    float f = 1.0f;
    if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * kLog2e, joint = fmaxf(top, sink);
        f = power2(top - joint);
        sum = sum * f + power2(sink - joint);
    }
    f = sum > 0.0f ? f * gain_of(a, head) / sum : 0.0f;
    v = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
    if constexpr (kNarrows) {
        if (to.x != nullptr) {
            float scale;
            const int at = s.start + token;
            *reinterpret_cast<uint32_t *>(to.x + at * to.row_bytes + head * 128 + d) = codes_of_row(v, scale);
            if (d == 0) to.scales[head * to.scale_stride + at] = scale;
            if (to.is_all) return;
        }
    }
    store4(a, static_cast<int64_t>(s.start + token) * a.out_stride + static_cast<int64_t>(head) * a.v_width + d, a.v_width - d, v);
}

// Dead rows' are zeros, too.
__device__ __forceinline__ void clear_narrowed(const AttentionArguments &a, const Narrowed &to) {
    for (int t = blockIdx.x; t < a.info->n_tokens; t += gridDim.x) {
        if (!(a.row_flags[a.token_row[t]] & PK_ROW_DEAD)) continue;
        for (int i = threadIdx.x; i < a.n_heads * 32; i += blockDim.x) reinterpret_cast<uint32_t *>(to.x + t * to.row_bytes)[i] = 0;
        for (int i = threadIdx.x; i < a.n_heads; i += blockDim.x) to.scales[i * to.scale_stride + t] = 1.0f;
    }
}

// Partial sums of a slot: [16][kD] of O, then [16][2] of largest logit and sum.
template <int kD>
__device__ __forceinline__ float *part_of(const AttentionArguments &a, int slot) { return a.partial + static_cast<int64_t>(slot) * (16 * kD + 32); }

// Adds what the row shares with others (share.cu).
__device__ __forceinline__ void add_shared(const AttentionArguments &a, const Segment &s, int row, int d, float4 &v, float &sum, float &top) {
    const int64_t first = s.share.part + static_cast<int64_t>(s.head) * s.share.stride + row, step = static_cast<int64_t>(a.n_kv_heads) * s.share.stride;
    float most = top;
#pragma unroll 8
    for (int i = 0; i < s.share.n_pieces; ++i) most = fmaxf(most, a.share_ml[first + i * step].x);
    const float fade = power2(top - most);
    top = most;
    sum *= fade;
    v = make_float4(v.x * fade, v.y * fade, v.z * fade, v.w * fade);
#pragma unroll 8
    for (int i = 0; i < s.share.n_pieces; ++i) {
        const float2 ml = a.share_ml[first + i * step];
        const float4 x = *reinterpret_cast<const float4 *>(a.share_part + (first + i * step) * a.share_width + d);
        const float f = power2(ml.x - most);
        sum += f * ml.y;
        v.x += f * x.x; v.y += f * x.y; v.z += f * x.z; v.w += f * x.w;
    }
}

// Joins what the blocks of a (row, head, tile) left.
template <int kD, bool kNarrows>
__device__ void join_parts(const AttentionArguments &a, const Segment &s, int rows_here, const Narrowed &to) {
    for (int j = threadIdx.x; j < rows_here * (kD / 4); j += kThreads) {
        const int row = j / (kD / 4), d = j % (kD / 4) * 4;
        auto slot = [&](int b) { return b == s.block_first ? 2 * b + 1 : 2 * b; };
        float top = -INFINITY, sum = 0.0f;
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int b = s.block_first; b <= s.block_last; ++b) top = fmaxf(top, __ldcg(part_of<kD>(a, slot(b)) + 16 * kD + 2 * row));
        const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll 8
        for (int b = s.block_first; b <= s.block_last; ++b) {
            const float *part = part_of<kD>(a, slot(b));
            const float2 ml = __ldcg(reinterpret_cast<const float2 *>(part + 16 * kD + 2 * row));
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(part + row * kD + d));
            const float f = power2(ml.x - base);
            sum += f * ml.y;
            v.x += f * x.x; v.y += f * x.y; v.z += f * x.z; v.w += f * x.w;
        }
        if (s.share.tokens > 0) add_shared(a, s, row, d, v, sum, top);
        if (d < a.v_width) finish4<kNarrows>(a, s, row, d, v, sum, top, to);
    }
}

// What a pair's segments came to so far.
struct Joined {
    float top = -INFINITY, sum = 0.0f;
    float4 v = make_float4(0, 0, 0, 0);
};

// One more segment, in order. Rounded as written, so that it does not matter where the sums so far were kept.
__device__ __forceinline__ void join(Joined &all, float top, float sum, float4 v) {
    const float most = fmaxf(all.top, top), base = most == -INFINITY ? 0.0f : most, f = power2(all.top - base), g = power2(top - base);
    all.top = most;
    all.sum = __fmaf_rn(g, sum, __fmul_rn(f, all.sum));
    all.v.x = __fmaf_rn(g, v.x, __fmul_rn(f, all.v.x));
    all.v.y = __fmaf_rn(g, v.y, __fmul_rn(f, all.v.y));
    all.v.z = __fmaf_rn(g, v.z, __fmul_rn(f, all.v.z));
    all.v.w = __fmaf_rn(g, v.w, __fmul_rn(f, all.v.w));
}

// Joins the segments of a tile that lie in memory.
template <int kD>
__device__ void join_segments(const AttentionArguments &a, const Segment &s, const CutPlace &place, int rows_here) {
    for (int j = threadIdx.x; j < rows_here * (kD / 4); j += kThreads) {
        const int row = j / (kD / 4), d = j % (kD / 4) * 4;
        Joined all;
#pragma unroll 4
        for (int i = 0; i < place.n_segments; ++i) {
            const float *part = part_of<kD>(a, place.first_segment + i);
            const float2 ml = __ldcg(reinterpret_cast<const float2 *>(part + 16 * kD + 2 * row));
            join(all, ml.x, ml.y, __ldcg(reinterpret_cast<const float4 *>(part + row * kD + d)));
        }
        if (d < a.v_width) finish4<false>(a, s, row, d, all.v, all.sum, all.top, {});
    }
}

// Whether a warp ends a row's head by itself, in 16 bytes at a time.
__device__ __forceinline__ bool ends_alone(const AttentionArguments &a, const Team &team, const Segment &s, const Narrowed &narrowed) {
    return team.shift == 0 && s.block_first == s.block_last && s.share.tokens == 0 && narrowed.x == nullptr && a.out_format == PK_BF16 && a.v_width == 128 && a.out_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
}

// How a launch takes its rows: alone, alone and all of one token with few heads of queries (attention_columns.cuh), with prefill in front that lets it
// begin (attention_beside.cuh; by columns, too, where all of them are such), or cut at fixed positions.
enum Form { kIsAlone, kIsSingle, kIsBeside, kIsCut };
template <int kD, int kKind>
constexpr bool kHasSingle = kD == 128 && (kKind == kBf16 || kKind == kF16);

template <int kD, int kKind, bool kTensor, Form kForm>
__global__ void __launch_bounds__(kThreads, kD <= 128 ? 2 : 1) attention_decode_kernel(const __grid_constant__ AttentionArguments a, const __grid_constant__ Maps maps, int n_parts, Beside beside, const __grid_constant__ Narrowed narrowed, const int4 *plan) {
    extern __shared__ uint8_t raw[];
    uint8_t *shared = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    constexpr int kStages = kRingStages<kD, kKind>, kSize = kGroup<kD, kKind>;
    constexpr bool kCut = kForm == kIsCut, kBeside = kForm == kIsBeside, kSingle = kForm == kIsSingle;
    constexpr bool kTeams = !kCut && kHoldQ<kD>;
    __shared__ uint64_t full[kWarps][kStages];
    __shared__ int warps[kSums * kWarps];
    __shared__ int is_last;
    __shared__ float merge_top[kWarps][16], merge_sum[kWarps][16];
    __shared__ float2 kept[2][kCut ? 16 : 1];  // largest logits and sums of the tile's segments so far; read and written in turns
    __shared__ uint64_t q_full[kHoldQ<kD> ? kWarps : kQBuffers<kD>], begun;
    uint8_t *q_at = shared + kWarps * kWarpBytes<kD, kKind>;
    float(*merge)[kMergeBytes<kD> / 4] = reinterpret_cast<float(*)[kMergeBytes<kD> / 4]>(q_at + kQBuffers<kD> * kQBytes<kD>);
    int *ends = reinterpret_cast<int *>(merge + kWarps);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = a.n_heads / a.n_kv_heads;
    if (kBeside && threadIdx.x == 0) ring_init(&begun, 1);
    if (threadIdx.x < kWarps * kStages) ring_init(&full[0][0] + threadIdx.x, kTensor ? 1 : 32);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kTensor) fence_async_proxy();
#endif
    std::conditional_t<kCut, CutWork<kSize>, EvenWork<kSize, kBeside>> work{a, ends};
    Segment s = {};
    CutPlace place = {}, next_place = {};
    bool has_work;
    int shift = 2, planned_page = -1;
    if constexpr (kCut) {
        has_work = work.begin(warps, n_parts);
        if (has_work) work.next(s, place);
    } else {
        bool is_planned = false;
        if constexpr (kSingle) {
            if (plan != nullptr) {
                is_planned = read_plan(a, plan + (blockIdx.x * kWarps + warp) * (kPlanEntryBytes / 16), s, work, has_work, planned_page);
                shift = work.shift;
                if (!is_planned) {
                    planned_page = -1;
                    work.parts = 1;
                    work.shift = 2;
                    work.at = work.until = 0;
                }
            }
        }
        if (!is_planned) {
            work.template begin<kD>(warps, kTeams ? 0 : 2, kKind == kF32 ? 2 : kShift<kKind>);
            if constexpr (kTeams) shift = work.shift;
            has_work = work.next(s);
        }
    }
    const Team team(shift);
    if (threadIdx.x < kQBuffers<kD> << (2 - shift)) ring_init(&q_full[threadIdx.x], 32 << shift);
    __syncthreads();
    int n_before = 0;  // blocks that knew before this one
    auto wait_front = [&] {
        if constexpr (kBeside) {
            if (threadIdx.x == 0) {
                wait_told(beside);
                n_before = atomicAdd(beside.words + 1, 1);
                ring_arrive(&begun);
            }
            while (!ring_ready(&begun, 0)) {}
            fence_told();
        } else {
            wait_dependence();
        }
        release_dependents();
    };
    if (has_work) {
        Warp<kD, kKind, kTensor, kSingle || kBeside> w{a, maps, shared + warp * kWarpBytes<kD, kKind>, full[warp], lane, team};
        Segment next = s;
        w.begin(s, planned_page);
        uint8_t *const q_team = q_at + team.number * team.rows() * kQPieces<kD> * 16;
        uint64_t *const q_is_full = q_full + team.number;
        const bool plain = a.softcap <= 0.0f && a.scale > 0.0f;
        const float c = plain ? a.scale * kLog2e : 1.0f;
        bool has_next = false;
        // Segment after segment; form: what their sums are kept in.
        auto take_all = [&](auto form) __attribute__((always_inline)) {
            for (int turn = 0;; ++turn) {
                uint8_t *q_mine = q_team + turn % kQBuffers<kD> * kQBytes<kD>;
                typename decltype(form)::type sums;
                constexpr bool kColumns = std::is_same_v<typename decltype(form)::type, Columns<kD, kKind>>;
                sums.open(a, s);
                has_next = false;
#pragma unroll 1
                for (int n = turn == 0 ? -1 : 0;; ++n) {
                    w.fetch_until(s, next, n < 0 ? w.n_old(s) : n + kStages);
                    if (n < 0) {
                        wait_front();
                        ask_q<kD, kKind>(a, s, team, q_team, q_is_full);
                        continue;
                    }
                    if (n == 0) {
                        while (!ring_ready(q_is_full + turn % kQBuffers<kD>, turn / kQBuffers<kD> & 1)) {}
                        sums.hold(q_mine, team.rows());
                        if constexpr (kCut) has_next = work.next(next, next_place);
                        else has_next = work.next(next);
                        if (has_next) {
                            w.see(next);
                            if constexpr (kHoldQ<kD>) team.meet();  // every warp has read its q
                            ask_q<kD, kKind>(a, next, team, q_team + (turn + 1) % kQBuffers<kD> * kQBytes<kD>, q_is_full + (turn + 1) % kQBuffers<kD>);
                        }
                    }
                    if (n == w.mine) break;
                    const int first = w.first_of(s, n);
                    const uint32_t k_at = shared_address(w.wait(s, first));
                    sums.add(a, s, first, q_mine, k_at, k_at + Warp<kD, kKind, kTensor>::kBytes, plain, c);
                    __syncwarp();
                }
                if constexpr (kColumns) {
                    if (ends_alone(a, team, s, narrowed)) {
                        sums.finish(a, s);
                        if (!has_next) break;
                        w.pass();
                        s = next;
                        continue;
                    }
                }
                // Join the warps, a few rows at a time.
                const int rows_here = min(16, s.n_pairs - s.pair), n_team = kTeams ? 1 << team.shift : kWarps, team_first = kTeams ? team.number << team.shift : 0;
                const bool is_alone = s.block_first == s.block_last, is_whole = kCut ? place.n_segments == 1 : is_alone;
                float *part = part_of<kD>(a, !kCut ? 2 * blockIdx.x + (s.is_first ? 1 : 0) : is_alone ? n_parts + blockIdx.x : place.segment);
                sums.end(merge_top[warp], merge_sum[warp]);
#pragma unroll 1
                for (int first = 0; first < rows_here; first += kMergeRows<kD>) {
                    sums.put(merge[warp], first);
                    team.meet();
#pragma unroll 1
                    for (int j = team.thread; j < min(kMergeRows<kD>, rows_here - first) * (kD / 4); j += 32 << team.shift) {
                        const int in = j / (kD / 4), row = first + in, d = j % (kD / 4) * 4;
                        float most = -INFINITY, all = 0.0f;
                        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll(kTeams ? 1 : kWarps)
                        for (int i = 0; i < n_team; ++i) most = fmaxf(most, merge_top[team_first + i][row]);
                        const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll(kTeams ? 1 : kWarps)
                        for (int i = 0; i < n_team; ++i) {
                            const float f = power2(merge_top[team_first + i][row] - base);
                            const float4 y = *reinterpret_cast<const float4 *>(&merge[team_first + i][in * kD + d]);
                            all += f * merge_sum[team_first + i][row];
                            v.x += f * y.x; v.y += f * y.y; v.z += f * y.z; v.w += f * y.w;
                        }
                        if constexpr (kCut) {
                            // A tile that is this block's alone: what its segments came to so far, each thread's own numbers.
                            if (is_alone && !is_whole) {
                                Joined before;
                                if (!s.is_first) {
                                    before.top = kept[turn & 1][row].x;
                                    before.sum = kept[turn & 1][row].y;
                                    before.v = __ldcg(reinterpret_cast<const float4 *>(part + row * kD + d));
                                }
                                join(before, most, all, v);
                                most = before.top;
                                all = before.sum;
                                v = before.v;
                                if (d == 0) kept[~turn & 1][row] = make_float2(most, all);
                            }
                        }
                        if (is_whole || (kCut && is_alone && place.is_last)) {
                            if (!kCut && s.share.tokens > 0) add_shared(a, s, row, d, v, all, most);
                            if (d < a.v_width) finish4<kSingle>(a, s, row, d, v, all, most, narrowed);
                        } else {
                            __stcg(reinterpret_cast<float4 *>(part + row * kD + d), v);
                            if (d == 0) __stcg(reinterpret_cast<float2 *>(part + 16 * kD + 2 * row), make_float2(most, all));
                        }
                    }
                    team.meet();
                }
                if (!is_whole && (kCut ? !is_alone && place.is_last_here : true)) {
                    if (threadIdx.x == 0) {
                        __threadfence();
                        is_last = atomicAdd(a.counters + s.block_first, 1) == s.block_last - s.block_first;
                        if (is_last) a.counters[s.block_first] = 0;
                        __threadfence();
                    }
                    __syncthreads();
                    if (is_last) {
                        if constexpr (kCut) join_segments<kD>(a, s, place, rows_here);
                        else join_parts<kD, kSingle>(a, s, rows_here, narrowed);
                    }
                }
                if (!has_next) break;
                w.pass();
                s = next;
                place = next_place;
            }
        };
        if constexpr (kSingle) {
            take_all(std::type_identity<Columns<kD, kKind>>{});
        } else if constexpr (kBeside && kHasSingle<kD, kKind>) {
            if (work.is_single) take_all(std::type_identity<Columns<kD, kKind>>{});
            else take_all(std::type_identity<Sums<kD, kKind>>{});
        } else {
            take_all(std::type_identity<Sums<kD, kKind>>{});
        }
    } else {
        wait_front();
    }
    if (kSingle && narrowed.x != nullptr) clear_narrowed(a, narrowed);
    if (!kSingle || !narrowed.is_all) clear_dead_rows(a);
    // What comes next waits for this launch alone.
    if (kBeside && threadIdx.x == 0 && n_before == static_cast<int>(gridDim.x) - 1) {
        beside.words[0] = beside.words[1] = 0;
        wait_dependence();
    }
}

#if defined(PK_WGMMA)

// Whether boxes of 128 bytes make up rows of keys.
template <int kD, int kKind>
constexpr bool kHasBoxes = kKind != kF32 && (kD << kShift<kKind>) % 128 == 0;

template <int kD, int kKind>
bool make_maps(const Launch &l, const AttentionArguments &a, Maps *maps) {
    constexpr int kRow = kD << kShift<kKind>;
    if (a.head_width != kD || a.v_width != kD || a.page_shift < 4) return false;
    const auto type = kKind == kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kKind == kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t size[5] = {128u >> kShift<kKind>, 8, kRow / 128, static_cast<cuuint64_t>(a.n_kv_heads) * a.page_tokens / 8, 1u << 30};
    const cuuint64_t stride[4] = {kRow, 128, 8 * kRow, static_cast<cuuint64_t>(a.page_stride)};
    const cuuint32_t box[5] = {128u >> kShift<kKind>, 8, kRow / 128, 2, 1}, step[5] = {1, 1, 1, 1, 1};
    for (int part = 0; part < 2; ++part)
        if (l.ctx->driver.encode_tiled(part ? &maps->v : &maps->k, type, 5, const_cast<uint8_t *>(a.kv) + (part ? a.v_offset : a.k_offset), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
            return false;
    return true;
}

#endif

template <int kD, int kKind>
int32_t launch_kind(const Launch &l, const AttentionArguments &a, const Beside &beside, bool is_cut, const Narrowed &narrowed, const int4 *plan) {
    const dim3 grid(l.ctx->n_processors * (kD <= 128 ? 2 : 1)), block(kThreads);
    const int64_t bytes = 1024 + kWarps * kWarpBytes<kD, kKind> + kQBuffers<kD> * kQBytes<kD> + kWarps * kMergeBytes<kD> + a.max_rows * 4;
    // Segments of tiles that several blocks share have a place each, then every block has one.
    const int64_t room = l.scratch_bytes / ((16 * kD + 32) * 4) - static_cast<int64_t>(grid.x);
    const int n_parts = static_cast<int>(room < 1 << 20 ? room : 1 << 20);
    if (is_cut && n_parts < 1) return fail(PK_BAD_ARG, "attention: partial sums of %u blocks take %lld bytes, the workspace has %lld", grid.x, static_cast<long long>(grid.x) * (16 * kD + 32) * 4, static_cast<long long>(l.scratch_bytes));
    Maps maps = {};
#if defined(PK_WGMMA)
    Launch own = l;
    own.overlap = true;  // blocks set themselves up while q, K and V are made
    if constexpr (kHasBoxes<kD, kKind>)
        if (make_maps<kD, kKind>(l, a, &maps)) {
            if constexpr (kHasSingle<kD, kKind>)
                if (l.decode_only && !is_cut && beside.words == nullptr && a.n_heads <= 8 * a.n_kv_heads)
                    return launch(own, "attention decode", attention_decode_kernel<kD, kKind, true, kIsSingle>, grid, block, bytes, a, maps, n_parts, beside, narrowed, plan);
            if (narrowed.x != nullptr) return fail(PK_UNSUPPORTED, "attention: rows narrowed of a step that has not single tokens alone");
            return launch(own, "attention decode", is_cut ? attention_decode_kernel<kD, kKind, true, kIsCut> : beside.words != nullptr ? attention_decode_kernel<kD, kKind, true, kIsBeside> : attention_decode_kernel<kD, kKind, true, kIsAlone>, grid, block, bytes, a, maps, n_parts, beside, narrowed, plan);
        }
#endif
    if (narrowed.x != nullptr) return fail(PK_UNSUPPORTED, "attention: rows narrowed without boxes of pages");
    // Without boxes a launch is never beside: it waits for prefill, whose word nobody asks for then.
    return launch(l, "attention decode", is_cut ? attention_decode_kernel<kD, kKind, false, kIsCut> : attention_decode_kernel<kD, kKind, false, kIsAlone>, grid, block, bytes, a, maps, n_parts, beside, narrowed, plan);
}

}  // namespace

template <int kD>
int32_t launch_attention_decode(const Launch &l, const AttentionArguments &a, const Beside &beside, bool is_cut, const Narrowed &narrowed, const void *plan) {
    const int4 *first = static_cast<const int4 *>(plan);
    switch (a.kv_format) {
        case PK_BF16: return launch_kind<kD, kBf16>(l, a, beside, is_cut, narrowed, first);
        case PK_F16: return launch_kind<kD, kF16>(l, a, beside, is_cut, narrowed, first);
        case PK_FP8_E4M3: return launch_kind<kD, kFp8>(l, a, beside, is_cut, narrowed, first);
        default: return launch_kind<kD, kF32>(l, a, beside, is_cut, narrowed, first);
    }
}
template int32_t launch_attention_decode<PK_WIDTH>(const Launch &l, const AttentionArguments &a, const Beside &beside, bool is_cut, const Narrowed &narrowed, const void *plan);

#if PK_WIDTH == 128
// Of heads of 128 in BF16 and F16, whose groups are alike; by the grid of launch_kind().
int32_t launch_attention_plan(const Launch &l, const AttentionArguments &a, void *plan) {
#if defined(PK_WGMMA)
    return launch(l, "attention plan", attention_plan_kernel<128, kBf16>, dim3(l.ctx->n_processors * 2), dim3(kThreads), a.max_rows * 8, a, static_cast<int4 *>(plan));
#else
    return PK_OK;
#endif
}
#endif

}  // namespace pk
