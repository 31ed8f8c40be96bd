// Paged attention for rows of many tokens (FlashAttention-2 form): out[t, h] = softmax(scale q.k) v over the pages.
//
// An item is (row, KV head, tile of 128 (token, head) pairs): heads that share a KV head share its loads. Eight warps of 16
// pairs, K and V tiles of kTile positions in two cp.async stages, S and O in mma registers. Items are found from the row
// lengths in device memory; later tiles of a row first, since they see more positions. Grid: persistent. KV: BF16 and F16 are
// copied and multiplied as they are, others become BF16. Does not handle: rows that is_decode_row() gives to decode.
#include "../../include/attention_tiles.cuh"
#include "../../include/half.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kPairs = 128, kStages = 2;

// Two neighbours of the q row of a pair, two weights, and a product, in F16 or in BF16.
template <bool kHalf>
__device__ __forceinline__ uint32_t pair_of_q(const AttentionArguments &a, const TileItem &item, int pair, int column) {
    if constexpr (!kHalf) return pair_q(a, item, pair, column);
    if (pair >= item.n_pairs || column >= a.head_width) return 0;
    const int64_t at = place_q(a, item, pair, column);
    return pair_f16(load_as_f32(a.q, at, a.q_format), load_as_f32(a.q, at + 1, a.q_format));
}
template <bool kHalf>
__device__ __forceinline__ uint32_t pack_weights(float low, float high) { return kHalf ? pair_f16(low, high) : pack_bf16(low, high); }
template <bool kHalf>
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (kHalf) mma_f16(d, a0, a1, a2, a3, b0, b1);
    else mma_bf16(d, a0, a1, a2, a3, b0, b1);
}

template <int kD, bool kCopy, bool kHalf>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_kernel(const __grid_constant__ AttentionArguments a) {
    constexpr int kTile = kD <= 128 ? 64 : 32;
    constexpr bool kKeepQ = kD <= 128;
    constexpr int kQBytes = kKeepQ ? 0 : kPairs * kRowBytes<kD>, kStageBytes = 2 * kTile * kRowBytes<kD>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int warps[8];
    __shared__ int total;
    int *ends = reinterpret_cast<int *>(shared + kQBytes + kStages * kStageBytes);
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = a.n_heads / a.n_kv_heads;
    const int n_tiles = schedule_tiles<kThreads, kPairs>(a, ends, warps, &total);
    const uint32_t q_at = shared_address(shared), ring_at = q_at + kQBytes;
    const int k_pieces = a.head_width / 8, v_pieces = a.v_width / 8;

    for (int index = blockIdx.x; index < n_tiles * a.n_kv_heads; index += gridDim.x) {
        const TileItem item = find_tile<kPairs>(a, ends, n_tiles, index);
        const int head = item.head, start = item.start, position = item.position, n_pairs = item.n_pairs, first_pair = item.first_pair;
        const int kv_first = item.kv_first, kv_end = item.kv_end;
        const int32_t *pages = item.pages;

        int pair[2], limit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            pair[h] = first_pair + warp * 16 + (lane >> 2) + 8 * h;
            limit[h] = pair[h] < n_pairs ? position + pair[h] / group : -1;
        }
        uint32_t q[kKeepQ ? kD / 16 : 1][4];
        if constexpr (kKeepQ) {
#pragma unroll
            for (int k = 0; k < kD / 16; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) q[k][e] = pair_of_q<kHalf>(a, item, pair[e & 1], 16 * k + 2 * (lane & 3) + 8 * (e >> 1));
        } else {
            for (int i = tid; i < kPairs * kD / 2; i += kThreads) {
                const int p = i / (kD / 2), column = i % (kD / 2) * 2;
                *reinterpret_cast<uint32_t *>(shared + piece_offset<kD>(p, column / 8) + (column & 7) * 2) = pair_of_q<kHalf>(a, item, first_pair + p, column);
            }
        }
        float o[kD / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        const int n_steps = (kv_end - kv_first + kTile - 1) / kTile;

        auto fetch = [&](int n) {
            if (n < n_steps) {
                constexpr int kPieces = kD / 8, kPer = kTile * kPieces / kThreads;
                const int first = kv_first + n * kTile;
#pragma unroll
                for (int j = 0; j < kPer; ++j) {
                    const int i = j * kThreads + tid, token = i / kPieces, piece = i % kPieces, p = first + token;
                    const bool in = p < kv_end;
                    const int at = in ? p : kv_end - 1;
                    const uint8_t *page = a.kv + static_cast<int64_t>(pages[page_of(a, at)]) * a.page_stride;
                    const int64_t in_page = static_cast<int64_t>(head) * a.page_tokens + at - page_of(a, at) * a.page_tokens;
#pragma unroll
                    for (int part = 0; part < 2; ++part) {
                        const bool ok = in && piece < (part ? v_pieces : k_pieces);
                        const uint8_t *base = page + (part ? a.v_offset : a.k_offset);
                        const int64_t element = in_page * (part ? a.v_width : a.head_width) + (ok ? piece * 8 : 0);
                        const uint32_t offset = (n % kStages) * kStageBytes + part * kTile * kRowBytes<kD> + piece_offset<kD>(token, piece);
                        if constexpr (kCopy) {
                            copy16_async(ring_at + offset, base + element * 2, ok);
                        } else {
                            *reinterpret_cast<uint4 *>(shared + kQBytes + offset) = ok ? load_kv8(base, element, a.kv_format) : make_uint4(0, 0, 0, 0);
                        }
                    }
                }
            }
            commit_async();
        };
        fetch(0);
        for (int n = 0; n < n_steps; ++n) {
            fetch(n + 1);
            wait_async<1>();
            __syncthreads();
            const uint32_t k_at = ring_at + n % kStages * kStageBytes, v_at = k_at + kTile * kRowBytes<kD>;
            float s[kTile / 8][4] = {};
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) {
                uint32_t qk[4];
                if constexpr (kKeepQ) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) qk[e] = q[k][e];
                } else {
                    load_matrix4(qk, q_at + piece_offset<kD>(warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
                }
#pragma unroll
                for (int t = 0; t < kTile / 16; ++t) {
                    uint32_t b[4];
                    load_matrix4(b, k_at + piece_offset<kD>(t * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
                    multiply<kHalf>(s[2 * t], qk[0], qk[1], qk[2], qk[3], b[0], b[1]);
                    multiply<kHalf>(s[2 * t + 1], qk[0], qk[1], qk[2], qk[3], b[2], b[3]);
                }
            }
            const int first = kv_first + n * kTile;
            // Whole tiles below every limit of this block need no mask.
            const bool masked = first + kTile > position + first_pair / group + 1 || a.window > 0 || first_pair + kPairs > n_pairs;
            logits2<kTile / 2>(&s[0][0], a.scale, a.softcap);
            if (masked) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int p = first + t * 8 + 2 * (lane & 3) + e;
                            if (p > limit[h] || (a.window > 0 && p <= limit[h] - a.window)) s[t][2 * h + e] = -INFINITY;
                        }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = -INFINITY;
#pragma unroll
                for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) most = fmaxf(most, s[t][2 * h + e]);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                const float next = fmaxf(top[h], most), base = next == -INFINITY ? 0.0f : next, fade = power2(top[h] - base);
                float part = 0.0f;
#pragma unroll
                for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float &x = s[t][2 * h + e];
                        x = power2(x - base);
                        part += x;
                    }
                sum[h] = sum[h] * fade + part;
                top[h] = next;
#pragma unroll
                for (int d = 0; d < kD / 8; ++d) {
                    o[d][2 * h] *= fade;
                    o[d][2 * h + 1] *= fade;
                }
            }
#pragma unroll
            for (int t = 0; t < kTile / 16; ++t) {
                const uint32_t p0 = pack_weights<kHalf>(s[2 * t][0], s[2 * t][1]), p1 = pack_weights<kHalf>(s[2 * t][2], s[2 * t][3]);
                const uint32_t p2 = pack_weights<kHalf>(s[2 * t + 1][0], s[2 * t + 1][1]), p3 = pack_weights<kHalf>(s[2 * t + 1][2], s[2 * t + 1][3]);
#pragma unroll
                for (int d = 0; d < kD / 16; ++d) {
                    uint32_t b[4];
                    load_matrix4_transposed(b, v_at + piece_offset<kD>(t * 16 + (lane & 7) + ((lane >> 3) & 1) * 8, 2 * d + (lane >> 4)));
                    multiply<kHalf>(o[2 * d], p0, p1, p2, p3, b[0], b[1]);
                    multiply<kHalf>(o[2 * d + 1], p0, p1, p2, p3, b[2], b[3]);
                }
            }
            __syncthreads();
        }
        wait_async<0>();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (pair[h] >= n_pairs) continue;
            const int q_head = head * group + pair[h] % group;
            const float f = last_factor(a, q_head, top[h], sum[h]);
            const int64_t to = static_cast<int64_t>(start + pair[h] / group) * a.out_stride + static_cast<int64_t>(q_head) * a.v_width;
#pragma unroll
            for (int d = 0; d < kD / 8; ++d) {
                const int column = d * 8 + 2 * (lane & 3);
                if (column >= a.v_width) continue;
                store_out_pair(a, to + column, o[d][2 * h] * f, o[d][2 * h + 1] * f);
            }
        }
    }
}

template <int kD>
int32_t launch_width(const Launch &l, const AttentionArguments &a) {
    constexpr int kTile = kD <= 128 ? 64 : 32;
    const int64_t bytes = (kD <= 128 ? 0 : kPairs * kRowBytes<kD>) + kStages * 2 * kTile * kRowBytes<kD> + a.max_rows * 4;
    const dim3 grid(l.ctx->n_processors);
    auto *const kernel = a.kv_format == PK_BF16 ? attention_prefill_kernel<kD, true, false> : a.kv_format == PK_F16 ? attention_prefill_kernel<kD, true, true> : attention_prefill_kernel<kD, false, false>;
    return launch(l, "attention prefill", kernel, grid, dim3(kThreads), bytes, a);
}

}  // namespace

int32_t launch_attention_prefill(const Launch &l, const AttentionArguments &a) {
    const int width = a.head_width > a.v_width ? a.head_width : a.v_width;
    if (width <= 64) return launch_width<64>(l, a);
    if (width <= 96) return launch_width<96>(l, a);
    if (width <= 128) return launch_width<128>(l, a);
    if (width <= 192) return launch_width<192>(l, a);
    return launch_width<256>(l, a);
}

}  // namespace pk
