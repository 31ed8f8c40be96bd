// Paged attention on Hopper for rows of many tokens: out[t, h] = softmax(scale q.k) v over the pages, with wgmma.
//
// An item is (row, KV head, tile of 128 (token, head) pairs): heads that share a KV head share its loads. Two warpgroups of
// 64 pairs; Q, and two stages of 128 positions of K and V, lie in shared memory as panels of 64 columns (rows of 128 bytes,
// swizzled); S, P and O are wgmma register fragments. Items are found from the row lengths in device memory, later tiles
// first. Grid: persistent. Head widths 64 and 128 (others up to 128 are padded with zeros), KV as in decode.cu. Does not
// handle: rows that is_decode_row() gives to decode.
#include "../../include/attention.cuh"
#include "../../include/wgmma.cuh"

namespace pk {

bool has_wgmma(const pk_ctx *ctx);

namespace {

constexpr int kThreads = 256, kPairs = 128, kTile = 128, kStages = 2;

// Rows of panel p lie after all rows of panel p - 1.
template <int kRows>
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
    return (piece >> 3) * kRows * 128 + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// As matrix_descriptor, for an operand whose columns are contiguous and at most 64: both strides are those of eight rows.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ uint64_t column_descriptor(uint32_t shared) { return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{64} << 16) | ((shared & 0x3ffff) >> 4); }
#endif

template <int kD, bool kCopy>
__global__ void __launch_bounds__(kThreads, 1) attention_wgmma_kernel(const __grid_constant__ AttentionArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kQBytes = kPairs * kD * 2, kPartBytes = kTile * kD * 2, kStageBytes = 2 * kPartBytes, kPanels = kD / 64;
    extern __shared__ uint8_t raw[];
    uint8_t *shared = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    __shared__ int warps[8];
    __shared__ int total;
    int *ends = reinterpret_cast<int *>(shared + kQBytes + kStages * kStageBytes);
    wait_dependence();
    release_dependents();
    const int n_rows = a.info->n_rows, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = a.n_heads / a.n_kv_heads;
    int n_tiles = 0;
    for (int base = 0; base < n_rows; base += kThreads) {
        const int r = base + tid;
        const int end = block_scan(r < n_rows ? tiles_of<kPairs>(a, r) : 0, warps) + n_tiles;
        if (r < n_rows) ends[r] = end;
        __syncthreads();
        if (tid == kThreads - 1) total = end;
        __syncthreads();
        n_tiles = total;
        __syncthreads();
    }
    const uint32_t q_at = shared_address(shared), ring_at = q_at + kQBytes;
    const int k_pieces = a.head_width / 8, v_pieces = a.v_width / 8;

    for (int index = blockIdx.x; index < n_tiles * a.n_kv_heads; index += gridDim.x) {
        const int head = index % a.n_kv_heads, of_all = n_tiles - 1 - index / a.n_kv_heads;
        int low = 0, high = n_rows - 1;
        while (low < high) {
            const int mid = (low + high) >> 1;
            if (ends[mid] > of_all) high = mid; else low = mid + 1;
        }
        const int row = low, tile = of_all - (row ? ends[row - 1] : 0);
        const int start = a.row_start[row], n_tokens = a.row_start[row + 1] - start, position = a.row_position[row];
        const int n_pairs = n_tokens * group, first_pair = tile * kPairs;
        const int32_t *pages = a.page_table + static_cast<int64_t>(a.row_slot[row]) * a.slot_pages;
        const int last_token = min(first_pair + kPairs - 1, n_pairs - 1) / group;
        const int kv_end = position + last_token + 1;
        const int kv_first = a.window > 0 ? max(0, position + first_pair / group - a.window + 1) : 0;

        int pair[2], limit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            pair[h] = first_pair + warp * 16 + (lane >> 2) + 8 * h;
            limit[h] = pair[h] < n_pairs ? position + pair[h] / group : -1;
        }
        auto q_pair = [&](int p, int column) -> uint32_t {
            if (p >= n_pairs || column >= a.head_width) return 0;
            const int64_t from = static_cast<int64_t>(start + p / group) * a.q_stride + (head * group + p % group) * a.head_width + column;
            return load_q_pair(a, from);
        };
        for (int i = tid; i < kPairs * kD / 2; i += kThreads) {
            const int p = i / (kD / 2), column = i % (kD / 2) * 2;
            *reinterpret_cast<uint32_t *>(shared + panel_offset<kPairs>(p, column / 8) + (column & 7) * 2) = q_pair(first_pair + p, column);
        }
        float o[kPanels][32], s[kTile / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int d = 0; d < kPanels; ++d)
#pragma unroll
            for (int e = 0; e < 32; ++e) o[d][e] = 0.0f;
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
                        const uint32_t offset = (n % kStages) * kStageBytes + part * kPartBytes + panel_offset<kTile>(token, piece);
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
            fence_async_proxy();
            __syncthreads();
            const uint32_t k_at = ring_at + n % kStages * kStageBytes, v_at = k_at + kPartBytes, q_mine = q_at + (warp >> 2) * 64 * 128;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) {
                const int panel = k >> 2, in = (k & 3) * 32;
                wgmma_bf16_n128(s, matrix_descriptor(q_mine + panel * kPairs * 128 + in), matrix_descriptor(k_at + panel * kTile * 128 + in), k > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            const int first = kv_first + n * kTile;
            // Whole tiles below every limit of this block need no mask.
            const bool masked = first + kTile > position + first_pair / group + 1 || a.window > 0 || first_pair + kPairs > n_pairs;
            logits2<kTile / 2>(s, a.scale, a.softcap);
            if (masked) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int p = first + t * 8 + 2 * (lane & 3) + e;
                            if (p > limit[h] || (a.window > 0 && p <= limit[h] - a.window)) s[4 * t + 2 * h + e] = -INFINITY;
                        }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = -INFINITY;
#pragma unroll
                for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) most = fmaxf(most, s[4 * t + 2 * h + e]);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                const float next = fmaxf(top[h], most), base = next == -INFINITY ? 0.0f : next, fade = power2(top[h] - base);
                float part = 0.0f;
#pragma unroll
                for (int t = 0; t < kTile / 8; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float &x = s[4 * t + 2 * h + e];
                        x = power2(x - base);
                        part += x;
                    }
                sum[h] = sum[h] * fade + part;
                top[h] = next;
#pragma unroll
                for (int d = 0; d < kD / 8; ++d) {
                    o[d >> 3][4 * (d & 7) + 2 * h] *= fade;
                    o[d >> 3][4 * (d & 7) + 2 * h + 1] *= fade;
                }
            }
            uint32_t p[kTile / 16][4];
#pragma unroll
            for (int t = 0; t < kTile / 16; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[t][e] = pack_bf16(s[8 * t + 2 * e], s[8 * t + 2 * e + 1]);
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < kPanels; ++d)
#pragma unroll
                for (int t = 0; t < kTile / 16; ++t)
                    wgmma_bf16_registers_n64_transposed(o[d], p[t][0], p[t][1], p[t][2], p[t][3], column_descriptor(v_at + d * kTile * 128 + t * 16 * 128), 1);
            wgmma_commit();
            wgmma_wait<0>();
            __syncthreads();
        }
        wait_async<0>();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (pair[h] >= n_pairs) continue;
            const int q_head = head * group + pair[h] % group;
            float f = 1.0f;
            if (a.sinks != nullptr) {
                const float sink = a.sinks[q_head] * kLog2e, joint = fmaxf(top[h], sink);
                f = power2(top[h] - joint);
                sum[h] = sum[h] * f + power2(sink - joint);
            }
            f /= sum[h];
            const int64_t to = static_cast<int64_t>(start + pair[h] / group) * a.out_stride + static_cast<int64_t>(q_head) * a.v_width;
#pragma unroll
            for (int d = 0; d < kD / 8; ++d) {
                const int column = d * 8 + 2 * (lane & 3);
                if (column >= a.v_width) continue;
                store_out_pair(a, to + column, o[d >> 3][4 * (d & 7) + 2 * h] * f, o[d >> 3][4 * (d & 7) + 2 * h + 1] * f);
            }
        }
    }
#endif
}

template <int kD>
int32_t launch_width(const Launch &l, const AttentionArguments &a) {
    const int64_t bytes = 1024 + kPairs * kD * 2 + kStages * 2 * kTile * kD * 2 + a.max_rows * 4;
    const dim3 grid(l.ctx->n_processors);
    return a.kv_format == PK_BF16 ? launch(l, "attention prefill", attention_wgmma_kernel<kD, true>, grid, dim3(kThreads), bytes, a)
                                  : launch(l, "attention prefill", attention_wgmma_kernel<kD, false>, grid, dim3(kThreads), bytes, a);
}

}  // namespace

// False when this device or these widths want the other kernel.
bool launch_attention_wgmma(const Launch &l, const AttentionArguments &a, int32_t *status) {
    const int width = a.head_width > a.v_width ? a.head_width : a.v_width;
    if (!has_wgmma(l.ctx) || width > 128) return false;
    *status = width <= 64 ? launch_width<64>(l, a) : launch_width<128>(l, a);
    return true;
}

}  // namespace pk
