// Queries, keys and values of a step's tokens: norms of heads, rotation, keys and values to their pages. Operands F32 or BF16, queries F16, too.
#include <algorithm>

#include "../include/device.cuh"
#include "../include/half.cuh"
#include "../include/invariant.h"
#include "../include/operand.h"
#include "../include/turn.cuh"

namespace pk {
namespace {

struct QkvArguments {
    Operand qkv, q;
    const float *q_norm, *k_norm, *v_norm, *frequency, *gains;
    const StepInfo *info;
    const int32_t *position, *page, *row;
    uint8_t *kv;
    int64_t page_stride, k_offset, v_offset;
    int32_t n_heads, n_kv_heads, head_width, v_width, rope_width, rope_layout, page_tokens, kv_format, n_parts;
    float magnitude, eps;
};

constexpr int kWideThreads = 256, kMostTurns = 128, kPairThreads = 128;

// A number, or eight neighbours, in a format of KV.
__device__ __forceinline__ void store_as(void *base, int64_t i, int32_t format, float v) { store_from_f32(base, i, format, format == PK_F16 ? in_f16(v) : v); }
__device__ __forceinline__ void store8_as(void *base, int64_t i, int32_t format, const float (&v)[8]) {
    if (format == PK_F32 || format == PK_BF16) return store8(base, i, format, v);
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (format == PK_F16) w[k] = pack_f16(v[2 * k], v[2 * k + 1]);
        else w[k] = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * k], v[2 * k + 1]), __NV_SATFINITE, format == PK_FP8_E4M3 ? __NV_E4M3 : __NV_E5M2);
    }
    if (format == PK_F16) *reinterpret_cast<uint4 *>(static_cast<__half *>(base) + i) = make_uint4(w[0], w[1], w[2], w[3]);
    else *reinterpret_cast<uint2 *>(static_cast<uint8_t *>(base) + i) = make_uint2(w[0] | w[1] << 16, w[2] | w[3] << 16);
}

// A warp per head of a token: heads, then K heads, then V heads. Grid: tokens x groups of 4 heads. Shared: 4 heads.
__global__ void __launch_bounds__(128) qkv_kernel(const __grid_constant__ QkvArguments a) {
    extern __shared__ float heads[];
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, lane = threadIdx.x & 31, h = blockIdx.y * 4 + (threadIdx.x >> 5);
    if (t >= a.info->n_tokens || h >= a.n_heads + a.n_parts * a.n_kv_heads) return;
    const bool is_v = h >= a.n_heads + a.n_kv_heads, is_k = !is_v && h >= a.n_heads;
    const int width = is_v ? a.v_width : a.head_width;
    int64_t from = t * a.qkv.stride + static_cast<int64_t>(h) * a.head_width;
    if (is_v) from = t * a.qkv.stride + static_cast<int64_t>(a.n_heads + a.n_kv_heads) * a.head_width + static_cast<int64_t>(h - a.n_heads - a.n_kv_heads) * a.v_width;
    float *v = heads + (threadIdx.x >> 5) * max(a.head_width, a.v_width);
    float s = 0.0f;
    for (int i = lane; i < width; i += 32) {
        v[i] = load_as_f32(a.qkv.p, from + i, a.qkv.format);
        s += v[i] * v[i];
    }
    const int p = a.position[t];
    const float *norm = is_v ? a.v_norm : is_k ? a.k_norm : a.q_norm;
    if (norm != nullptr) {
        const float r = rsqrtf(warp_sum(s) / width + a.eps);
        for (int i = lane; i < width; i += 32) v[i] *= r * norm[i];
    }
    __syncwarp();
    if (!is_v) {
        if (a.frequency != nullptr) {
            const int half = a.rope_width / 2;
            for (int i = lane; i < half; i += 32) {
                const int x = a.rope_layout ? 2 * i : i, y = a.rope_layout ? 2 * i + 1 : i + half;
                float sine, cosine;
                sincosf(static_cast<float>(p) * a.frequency[i], &sine, &cosine);
                sine *= a.magnitude;
                cosine *= a.magnitude;
                const float vx = v[x], vy = v[y];
                v[x] = vx * cosine - vy * sine;
                v[y] = vx * sine + vy * cosine;
            }
        }
    }
    __syncwarp();
    const float gain = a.gains != nullptr ? a.gains[h] : 1.0f;
    if (!is_v && !is_k) {
        for (int i = lane; i < width; i += 32) store_as(a.q.p, t * a.q.stride + static_cast<int64_t>(h) * a.head_width + i, a.q.format, v[i] * gain);
        return;
    }
    const int head = h - a.n_heads - (is_v ? a.n_kv_heads : 0);
    uint8_t *base = a.kv + a.page[t] * a.page_stride + (is_v ? a.v_offset : a.k_offset);
    const int64_t at = (static_cast<int64_t>(head) * a.page_tokens + p % a.page_tokens) * width;
    for (int i = lane; i < width; i += 32) store_as(base, at + i, a.kv_format, v[i] * gain);
}

// The same eight neighbours a lane, `lanes` (a power of two) a head: all or some heads of a token a block, which turns each angle once. Grid: tokens, groups of heads.
__global__ void __launch_bounds__(kWideThreads) qkv_wide_kernel(const __grid_constant__ QkvArguments a, int lanes) {
    __shared__ float2 turns[kMostTurns];  // cosine and sine
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, half = a.frequency != nullptr ? a.rope_width / 2 : 0, n_keys_end = a.n_heads + a.n_kv_heads, n = a.n_heads + a.n_parts * a.n_kv_heads;
    if (t >= a.info->n_tokens) return;
    const int p = a.position[t], lane = threadIdx.x & 31, in = lane & (lanes - 1), k = in * 8;
    if (static_cast<int>(threadIdx.x) < half) {
        float sine, cosine;
        sincosf(static_cast<float>(p) * a.frequency[threadIdx.x], &sine, &cosine);
        turns[threadIdx.x] = make_float2(cosine * a.magnitude, sine * a.magnitude);
    }
    __syncthreads();
    const int each = 32 / lanes, step = gridDim.y * (kWideThreads / 32) * each;
    uint8_t *const page = a.kv + a.page[t] * a.page_stride;
    for (int first = (blockIdx.y * (kWideThreads / 32) + (threadIdx.x >> 5)) * each; first < n; first += step) {
        const int h = first + lane / lanes;
        const bool is_v = h >= n_keys_end, is_k = !is_v && h >= a.n_heads;
        const int width = is_v ? a.v_width : a.head_width;
        const bool is_here = h < n && k < width;
        const int64_t row = t * a.qkv.stride, from = is_v ? row + static_cast<int64_t>(n_keys_end) * a.head_width + static_cast<int64_t>(h - n_keys_end) * a.v_width : row + static_cast<int64_t>(h) * a.head_width;
        float v[8] = {};
        if (is_here) load8(a.qkv.p, from + k, a.qkv.format, v);
        const float *norm = is_v ? a.v_norm : is_k ? a.k_norm : a.q_norm;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
        for (int o = lanes / 2; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
        if (norm != nullptr && is_here) {
            const float r = rsqrtf(squares / width + a.eps);
            float w[8];
            load8(norm, k, PK_F32, w);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= r * w[i];
        }
        if (half && a.rope_layout) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                if (is_v || k + i >= 2 * half) continue;
                const float2 by = turns[(k + i) / 2];
                const float x = v[i], y = v[i + 1];
                v[i] = x * by.x - y * by.y;
                v[i + 1] = x * by.y + y * by.x;
            }
        } else if (half) {
            // The other number of a pair lies with a lane half / 8 further or before.
            const bool is_first = k < half, turns_here = !is_v && k < 2 * half;
            const int other = turns_here ? (is_first ? lane + half / 8 : lane - half / 8) : lane, angle = is_first ? k : k - half;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float far = __shfl_sync(~0u, v[i], other);
                if (!turns_here) continue;
                const float2 by = turns[angle + i];
                v[i] = is_first ? v[i] * by.x - far * by.y : far * by.y + v[i] * by.x;
            }
        }
        if (!is_here) continue;
        if (a.gains != nullptr) {
            const float gain = a.gains[h];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= gain;
        }
        if (!is_v && !is_k) {
            store8_as(a.q.p, t * a.q.stride + static_cast<int64_t>(h) * a.head_width + k, a.q.format, v);
            continue;
        }
        const int head = h - a.n_heads - (is_v ? a.n_kv_heads : 0);
        store8_as(page + (is_v ? a.v_offset : a.k_offset), (static_cast<int64_t>(head) * a.page_tokens + p % a.page_tokens) * width + k, a.kv_format, v);
    }
}

__device__ __forceinline__ void load4(const void *base, int64_t i, int32_t format, float *v) {
    if (format == PK_F32) {
        const float4 f = *reinterpret_cast<const float4 *>(static_cast<const float *>(base) + i);
        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
    } else {
        const uint2 f = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(base) + i);
        v[0] = low_f32(f.x); v[1] = high_f32(f.x); v[2] = low_f32(f.y); v[3] = high_f32(f.y);
    }
}
__device__ __forceinline__ void store4_as(void *base, int64_t i, int32_t format, const float *v) {
    if (format == PK_F32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(base) + i) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (format == PK_BF16) {
        *reinterpret_cast<uint2 *>(static_cast<bf16 *>(base) + i) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
    } else if (format == PK_F16) {
        *reinterpret_cast<uint2 *>(static_cast<__half *>(base) + i) = make_uint2(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]));
    } else {
        const auto kind = format == PK_FP8_E4M3 ? __NV_E4M3 : __NV_E5M2;
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[1]), __NV_SATFINITE, kind), high = __nv_cvt_float2_to_fp8x2(make_float2(v[2], v[3]), __NV_SATFINITE, kind);
        *reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(base) + i) = low | high << 16;
    }
}

// Heads of one width of which all columns turn, each of the first half with one of the second, or none: a lane has four of each half, 1 << lane_shift lanes
// (an eighth of the width) a head. Nothing is shared, and a warp's next heads are on their way. Grid: tokens, groups of heads.
__global__ void __launch_bounds__(kPairThreads, 10) qkv_pairs_kernel(const __grid_constant__ QkvArguments a, int lane_shift) {
    const int lane = threadIdx.x & 31, lanes = 1 << lane_shift, width = 8 << lane_shift, k = (lane & (lanes - 1)) * 4, half = width / 2, each = 32 >> lane_shift;
    const int n = a.n_heads + a.n_parts * a.n_kv_heads, step = gridDim.y * (kPairThreads / 32) * each, t = blockIdx.x;
    int h = (blockIdx.y * (kPairThreads / 32) + (threadIdx.x >> 5)) * each + (lane >> lane_shift);
    float frequency[4] = {};
    if (a.frequency != nullptr) load4(a.frequency, k, PK_F32, frequency);
    wait_dependence();
    release_dependents();
    if (t >= a.info->n_tokens || h - (lane >> lane_shift) >= n) return;
    float coming[8] = {}, sine[4], cosine[4];
    const int64_t row = t * a.qkv.stride + k;
    auto ask = [&](int of) {
        if (of >= n) return;
        load4(a.qkv.p, row + of * width, a.qkv.format, coming);
        load4(a.qkv.p, row + of * width + half, a.qkv.format, coming + 4);
    };
    ask(h);
    const int p = a.position[t];
    uint8_t *const page = a.kv + a.page[t] * a.page_stride;
    const int in_page = p % a.page_tokens * width + k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        turn(static_cast<float>(p) * frequency[i], &sine[i], &cosine[i]);
        sine[i] *= a.magnitude;
        cosine[i] *= a.magnitude;
    }
    // The heads of a warp come to an end together: lanes without one take part in shuffles.
    for (; h - (lane >> lane_shift) < n; h += step) {
        const bool is_v = h >= a.n_heads + a.n_kv_heads, is_q = h < a.n_heads;
        float v[8], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = coming[i];
            squares += v[i] * v[i];
        }
        ask(h + step);
        const float *norm = is_q ? a.q_norm : is_v ? a.v_norm : a.k_norm;
        for (int o = lanes / 2; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
        if (h >= n) continue;
        if (norm != nullptr) {
            const float r = rsqrtf(squares / width + a.eps);
            float w[8];
            load4(norm, k, PK_F32, w);
            load4(norm, k + half, PK_F32, w + 4);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= r * w[i];
        }
        if (!is_v && a.frequency != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = v[i], y = v[4 + i];
                v[i] = x * cosine[i] - y * sine[i];
                v[4 + i] = x * sine[i] + y * cosine[i];
            }
        }
        if (a.gains != nullptr) {
            const float gain = a.gains[h];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= gain;
        }
        void *const to = is_q ? a.q.p : page + (is_v ? a.v_offset : a.k_offset);
        const int head = h - a.n_heads - (is_v ? a.n_kv_heads : 0), format = is_q ? a.q.format : a.kv_format;
        const int64_t at = is_q ? t * a.q.stride + h * width + k : static_cast<int64_t>(head) * a.page_tokens * width + in_page;
        store4_as(to, at, format, v);
        store4_as(to, at + half, format, v + 4);
    }
}

}  // namespace

int32_t launch_qkv(const Launch &l, const pk_op_qkv &op) {
    QkvArguments a = {};
    const pk_state &s = *l.state;
    a.qkv = operand(op.qkv);
    a.q = operand(op.q);
    a.q_norm = reinterpret_cast<const float *>(op.q_norm.data);
    a.k_norm = reinterpret_cast<const float *>(op.k_norm.data);
    a.v_norm = reinterpret_cast<const float *>(op.v_norm.data);
    a.n_parts = op.parts == PK_PARTS_Q ? 0 : op.parts == PK_PARTS_LATENT ? 1 : 2;
    a.frequency = reinterpret_cast<const float *>(op.frequency.data);
    a.gains = reinterpret_cast<const float *>(op.gains.data);
    a.info = l.info;
    a.position = reinterpret_cast<const int32_t *>(s.token_position);
    a.page = reinterpret_cast<const int32_t *>(s.token_page);
    a.row = reinterpret_cast<const int32_t *>(s.token_row);
    a.kv = reinterpret_cast<uint8_t *>(s.kv);
    a.page_stride = s.kv_page_stride;
    a.k_offset = op.k_offset;
    a.v_offset = op.v_offset;
    a.n_heads = op.n_heads;
    a.n_kv_heads = op.n_kv_heads;
    a.head_width = op.head_width;
    a.v_width = op.v_width;
    a.rope_width = op.rope_width;
    a.rope_layout = op.rope_layout;
    a.page_tokens = s.page_tokens;
    a.kv_format = op.kv_format;
    a.magnitude = op.rope_magnitude;
    a.eps = op.eps;
    const int heads = op.n_heads + a.n_parts * op.n_kv_heads, widest = std::max(op.head_width, op.v_width);
    const int64_t rows = bound(l, op.qkv.rows);
    auto is_wide = [](const Operand &o) { return o.stride % 8 == 0 && reinterpret_cast<uintptr_t>(o.p) % 16 == 0; };
    const bool has_eights = op.head_width % 8 == 0 && op.v_width % 8 == 0 && widest <= 256 && (a.frequency == nullptr || (op.rope_width % 16 == 0 && op.rope_width <= 2 * kMostTurns));
    if (has_eights && is_wide(a.qkv) && is_wide(a.q) && ((s.kv | static_cast<uint64_t>(a.page_stride | a.k_offset | a.v_offset)) & 15) == 0 && ((op.q_norm.data | op.k_norm.data | op.v_norm.data) & 15) == 0) {
        int lanes = 1, lane_shift = 0;
        for (; lanes * 8 < widest; lanes *= 2) ++lane_shift;
        // Fewer tokens are no quicker by pairs, and more have waves enough to hide what a head waits for. Pairs add squares in another order than the others do.
        const bool has_pairs = !is_invariant(l.ctx) && op.head_width == lanes * 8 && op.v_width == op.head_width && (a.frequency == nullptr || (!op.rope_layout && op.rope_width == op.head_width && (op.frequency.data & 15) == 0));
        if (rows > 256 && rows < 1024 && has_pairs) {
            // As many groups of heads as have blocks on the device at once.
            int each = 1;
            if (int32_t e = check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, qkv_pairs_kernel, kPairThreads, 0), "qkv")) return e;
            const int64_t groups = std::clamp<int64_t>(int64_t{each} * l.ctx->n_processors / rows, 1, (int64_t{heads} * lanes + kPairThreads - 1) / kPairThreads);
            return launch(l, "qkv", qkv_pairs_kernel, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(groups)), dim3(kPairThreads), 0, a, lane_shift);
        }
        // Few tokens: a block for every group of heads; many: a token's heads by one block.
        const int groups = rows >= 1024 ? 1 : (heads * lanes + kWideThreads - 1) / kWideThreads;
        return launch(l, "qkv", qkv_wide_kernel, dim3(static_cast<unsigned>(rows), groups), dim3(kWideThreads), 0, a, lanes);
    }
    return launch(l, "qkv", qkv_kernel, dim3(static_cast<unsigned>(rows), (heads + 3) / 4), dim3(128), 16 * widest, a);
}

}  // namespace pk
