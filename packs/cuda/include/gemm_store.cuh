// How the tiled products on Hopper store a warp's sums: 16 rows of x, columns as wgmma leaves them.
#pragma once
#include "device.cuh"
#include "gather_columns.cuh"
#include "gemm.cuh"

namespace pk {

constexpr int kStorePitch = 36, kStoreFloats = 8 * kStorePitch;  // floats from one row of a warp's 8 x 32 in shared memory to the next, and of all

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// threadIdx.x, which the compiler takes for another value every time: what follows from it is not kept in registers over the products.
__device__ __forceinline__ int fresh_thread() {
    int v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}

// Adds to four floats where they lie.
__device__ __forceinline__ void add_in_memory(float *to, float4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// 128 columns of a row, from column n0 on, that four lanes have as pairs 8j + 2c: narrowed as src/matmul/quantise.cu does.
__device__ __forceinline__ void store_narrowed(const Narrowed &to, int n0, int row, int c, bool is_in, const uint32_t (&pairs)[16]) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) most = fmaxf(most, fmaxf(fabsf(low_f32(pairs[j])), fabsf(high_f32(pairs[j]))));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float scale = most > 0.0f ? most / 448.0f : 1.0f, inverse = 1.0f / scale;
    auto codes = [&](int j) { return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(low_f32(pairs[j]) * inverse, high_f32(pairs[j]) * inverse), __NV_SATFINITE, __NV_E4M3)); };
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        auto word = [&](int b) { return codes(4 * b + 2 * p) | codes(4 * b + 2 * p + 1) << 16; };
        // Of two groups of eight columns, what four lanes have.
        const uint4 w = gather_columns(word(0), word(1), word(2), word(3), c);
        const uint4 v = make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
        if (is_in) *reinterpret_cast<uint4 *>(to.x + static_cast<int64_t>(row) * to.row_bytes + n0 + 32 * c + 16 * p) = v;
    }
    if (is_in && c == 0) to.scales[(n0 >> 7) * to.scale_stride + row] = scale;
}

// Stores a whole tile's accumulators of rows `row` and row + 8, columns 8j + 2c and the next; false when this is no usual case.
template <int kTileN, class Sums>
__device__ __forceinline__ bool direct_store(const GemmArguments &a, int weight, bool gated, int n0, int row, int c, int n_rows, const Sums &acc) {
    const GemmWeight &w = a.w[weight];
    const int wide = gated ? kTileN / 2 : kTileN;
    if (n0 + wide > w.rows || w.row_scale != nullptr || w.bias != nullptr || a.softcap > 0.0f || ((a.y_stride | w.first_column) & 1) || (reinterpret_cast<uintptr_t>(a.y) & 7)) return false;
    const int64_t at = row * a.y_stride + w.first_column + n0 + 2 * c;
    const bool in[2] = {row < n_rows, row + 8 < n_rows};
    // BF16: pairs of columns of four lanes put together, 16 bytes a store where y allows it.
    const bool whole = ((a.y_stride | w.first_column) & 7) == 0 && (reinterpret_cast<uintptr_t>(a.y) & 15) == 0;
    auto store_pairs = [&](auto n, auto pair) {
        bf16 *y = static_cast<bf16 *>(a.y) + at;
        if (whole) {
            y += 6 * c;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < decltype(n)::value; j += 4) {
                    const uint4 v = gather_columns(pair(j, h), pair(j + 1, h), pair(j + 2, h), pair(j + 3, h), c);
                    if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride + 8 * j) = v;
                }
            return;
        }
#pragma unroll
        for (int j = 0; j < decltype(n)::value; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t v = pair(j, h);
                if (in[h]) *reinterpret_cast<uint32_t *>(y + 8 * h * a.y_stride + 8 * j) = v;
            }
    };
    if (gated) {
        const GemmWeight &u = a.w[1];
        if (a.act != PK_ACT_SILU || a.add != nullptr || a.y_format != PK_BF16 || u.row_scale != nullptr || u.bias != nullptr) return false;
        const float f = w.scale, g = u.scale * a.scale;
        auto pair = [&](int j, int h) {
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float gate = acc[4 * j + 2 * h + e] * f;
                v[e] = __fdividef(gate, 1.0f + __expf(-gate)) * acc[4 * (j + kTileN / 16) + 2 * h + e] * g;
            }
            return pack_bf16(v[0], v[1]);
        };
        if constexpr (kTileN == 256) {
            if (a.narrowed.x != nullptr) {
                uint32_t kept[2][16];
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int j = 0; j < 16; ++j) kept[h][j] = pair(j, h);
                if (!a.narrowed.is_all) store_pairs(std::integral_constant<int, 16>(), [&](int j, int h) { return kept[h][j]; });
#pragma unroll
                for (int h = 0; h < 2; ++h) store_narrowed(a.narrowed, n0, row + 8 * h, c, in[h], kept[h]);
                return true;
            }
        }
        store_pairs(std::integral_constant<int, kTileN / 16>(), pair);
        return true;
    }
    if (a.act != PK_ACT_NONE) return false;
    const float f = w.scale * a.scale;
    if (a.y_format == PK_BF16) {
        if (a.add != nullptr) return false;
        store_pairs(std::integral_constant<int, kTileN / 8>(), [&](int j, int h) { return pack_bf16(acc[4 * j + 2 * h] * f, acc[4 * j + 2 * h + 1] * f); });
        return true;
    }
    if (a.add != nullptr && a.add_format != PK_F32) return false;
    if constexpr (kTileN <= 128) {
        // Lanes 2i and 2i + 1 share columns of two neighbouring groups of eight, so that each has four in a row.
        if (((a.y_stride | a.add_stride | w.first_column) & 3) == 0 && ((reinterpret_cast<uintptr_t>(a.y) | reinterpret_cast<uintptr_t>(a.add)) & 15) == 0) {
            constexpr int kFlight = kTileN / 16;  // loads under way
            const bool odd = c & 1;
            // What lies in y already is added where it lies: nobody waits for it.
            const bool in_memory = a.add == a.y && a.add_stride == a.y_stride;
            const int64_t to = row * a.y_stride + w.first_column + n0 + 8 * odd + 2 * (c & 2), from = row * a.add_stride + w.first_column + n0 + 8 * odd + 2 * (c & 2);
            float *y = static_cast<float *>(a.y) + to;
            const float *add = static_cast<const float *>(a.add) + from;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float4 old[kFlight];
#pragma unroll
                for (int j = 0; j < kFlight; ++j)
                    old[j] = in[h] && a.add != nullptr && !in_memory ? __ldcg(reinterpret_cast<const float4 *>(add + 8 * h * a.add_stride + 16 * j)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int j = 0; j < kFlight; ++j) {
                    const int v = 8 * j + 2 * h;  // two of one group, two of the next
                    const float v0 = acc[v], v1 = acc[v + 1], v4 = acc[v + 4], v5 = acc[v + 5];
                    const float p = __shfl_xor_sync(~0u, odd ? v0 : v4, 1), q = __shfl_xor_sync(~0u, odd ? v1 : v5, 1);
                    const float4 o = odd ? make_float4(p, q, v4, v5) : make_float4(v0, v1, p, q);
                    const float4 sum = make_float4(o.x * f + old[j].x, o.y * f + old[j].y, o.z * f + old[j].z, o.w * f + old[j].w);
                    float *at = y + 8 * h * a.y_stride + 16 * j;
                    if (!in[h]) continue;
                    if (in_memory) add_in_memory(at, sum);
                    else __stcg(reinterpret_cast<float4 *>(at), sum);
                }
            }
            return true;
        }
    }
    // Two columns a lane.
    constexpr int kFlight = kTileN >= 128 ? 8 : kTileN / 8;  // loads under way
    if (((a.add_stride & 1) | (reinterpret_cast<uintptr_t>(a.add) & 7)) != 0) return false;
    float *y = static_cast<float *>(a.y) + at;
    const float *add = static_cast<const float *>(a.add) + row * a.add_stride + w.first_column + n0 + 2 * c;
#pragma unroll
    for (int first = 0; first < kTileN / 8; first += kFlight)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 old[kFlight];
#pragma unroll
            for (int j = 0; j < kFlight; ++j) old[j] = in[h] && a.add != nullptr ? *reinterpret_cast<const float2 *>(add + 8 * h * a.add_stride + 8 * (first + j)) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int j = 0; j < kFlight; ++j) {
                const float v[2] = {acc[4 * (first + j) + 2 * h], acc[4 * (first + j) + 2 * h + 1]};
                if (in[h]) *reinterpret_cast<float2 *>(y + 8 * h * a.y_stride + 8 * (first + j)) = make_float2(v[0] * f + old[j].x, v[1] * f + old[j].y);
            }
        }
    return true;
}

// As direct_store, of a residual that a norm follows: what it comes to times the norm's weight goes out in bf16, and sums of squares of 64 columns each.
template <int kTileN, class Sums>
__device__ __forceinline__ void store_front(const GemmArguments &a, int n0, int row, int c, int n_rows, const Sums &acc) {
    const float f = a.w[0].scale * a.scale;
    const bool in[2] = {row < n_rows, row + 8 < n_rows};
#pragma unroll
    for (int first = 0; first < kTileN; first += 64) {
        if (n0 + first >= a.w[0].rows) return;
        const int column = n0 + first + 2 * c;
        float square[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row + 8 * h;
            const float *add = static_cast<const float *>(a.add) + at * a.add_stride + column;
            float *y = static_cast<float *>(a.y) + at * a.y_stride + column;
            bf16 *out = static_cast<bf16 *>(a.norm.out) + at * a.norm.out_stride + column;
            float2 old[8], gain[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                old[j] = in[h] ? __ldcg(reinterpret_cast<const float2 *>(add + 8 * j)) : make_float2(0.0f, 0.0f);
                gain[j] = __ldg(reinterpret_cast<const float2 *>(a.norm.w + column + 8 * j));
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int v = first / 2 + 4 * j + 2 * h;
                const float low = acc[v] * f + old[j].x, high = acc[v + 1] * f + old[j].y;
                square[h] += low * low + high * high;
                if (!in[h]) continue;
                __stcg(reinterpret_cast<float2 *>(y + 8 * j), make_float2(low, high));
                *reinterpret_cast<uint32_t *>(out + 8 * j) = pack_bf16(low * gain[j].x, high * gain[j].y);
            }
            square[h] += __shfl_xor_sync(~0u, square[h], 1);
            square[h] += __shfl_xor_sync(~0u, square[h], 2);
            if (c == 0 && in[h]) a.norm.squares[((n0 + first) >> 6) * a.norm.stride + at] = square[h];
        }
    }
}

// Stores sums of 16 rows, the first m_first, by kTileN columns (gated: half of them gate, half up) from column n0 of weight
// `weight` on. `tiles`: kStoreFloats of shared memory for every warp after the fourth.
template <int kTileN, class Sums>
__device__ __forceinline__ void store_sums(const GemmArguments &a, int weight, bool gated, int n0, int m_first, int n_rows, const Sums &acc, float *tiles) {
    const int thread = fresh_thread(), lane = thread & 31;
    float *mine = tiles + (thread / 32 - 4) * kStoreFloats;
    // The usual cases straight from the registers, two neighbours a store: whole tiles without scales per column or bias.
    if (direct_store<kTileN>(a, weight, gated, n0, m_first + (lane >> 2), lane & 3, n_rows, acc)) return;
    // Eight rows x 32 columns at a time through shared memory (gated: 16 of gate, 16 of up), so that one copy of the
    // epilogue serves all accumulators and lanes store neighbouring columns.
    const GemmWeight &w = a.w[weight];
    const int wide = gated ? 16 : 32;
#pragma unroll 1
    for (int piece = 0; piece < kTileN / 16; ++piece) {
        const int chunk = piece >> 1, lower = piece & 1, m0 = m_first + 8 * lower;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < kTileN / 32; ++c) {
            if (c != chunk) continue;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int plain = 4 * (4 * c + q), twin = 4 * (2 * c + (q & 1) + (q >> 1) * (kTileN / 16));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float upper = gated ? acc[twin + e] : acc[plain + e], under = gated ? acc[twin + 2 + e] : acc[plain + 2 + e];
                    mine[(lane >> 2) * kStorePitch + 8 * q + 2 * (lane & 3) + e] = lower ? under : upper;
                }
            }
        }
        __syncwarp();
        const int column = n0 + chunk * wide + (lane & (wide - 1));
        if (column >= w.rows) continue;
        const float f0 = w.scale * (w.row_scale ? w.row_scale[column] : 1.0f), b0 = w.bias ? w.bias[column] : 0.0f;
        const float f1 = gated ? a.w[1].scale * (a.w[1].row_scale ? a.w[1].row_scale[column] : 1.0f) : 0.0f, b1 = gated && a.w[1].bias ? a.w[1].bias[column] : 0.0f;
        const int n_here = min(8, n_rows - m0);
        const float *from = mine + (lane & (wide - 1));
        const int64_t at = w.first_column + column;
        if (a.act == PK_ACT_NONE && a.softcap <= 0.0f && n_here == 8 && (a.add == nullptr || a.add_format == PK_F32)) {
            // The usual cases, without a decision per element: bf16, or f32 with the residual added.
            const float f = f0 * a.scale, b = b0 * a.scale;
            if (a.y_format == PK_BF16 && a.add == nullptr) {
                bf16 *to = static_cast<bf16 *>(a.y) + m0 * a.y_stride + at;
#pragma unroll
                for (int r = 0; r < 8; ++r) to[r * a.y_stride] = __float2bfloat16(from[r * kStorePitch] * f + b);
                continue;
            }
            if (a.y_format == PK_F32) {
                float *to = static_cast<float *>(a.y) + m0 * a.y_stride + at, old[8];
                const float *add = static_cast<const float *>(a.add) + m0 * a.add_stride + at;
#pragma unroll
                for (int r = 0; r < 8; ++r) old[r] = a.add ? add[r * a.add_stride] : 0.0f;
#pragma unroll
                for (int r = 0; r < 8; ++r) to[r * a.y_stride] = from[r * kStorePitch] * f + b + old[r];
                continue;
            }
        }
        if (gated && a.act == PK_ACT_SILU && a.softcap <= 0.0f && a.add == nullptr && a.y_format == PK_BF16 && n_here == 8) {
            bf16 *to = static_cast<bf16 *>(a.y) + (m0 + (lane >> 4)) * a.y_stride + at;
            from += (lane >> 4) * kStorePitch;
#pragma unroll
            for (int r = 0; r < 8; r += 2) {
                const float g = from[r * kStorePitch] * f0 + b0, u = from[r * kStorePitch + 16] * f1 + b1;
                to[r * a.y_stride] = __float2bfloat16(__fdividef(g, 1.0f + __expf(-g)) * u * a.scale);
            }
            continue;
        }
#pragma unroll 1
        for (int r = gated ? lane >> 4 : 0; r < n_here; r += gated ? 2 : 1) {
            const int m = m0 + r;
            float v = from[r * kStorePitch] * f0 + b0;
            if (gated) v = activate(v, a.act) * (from[r * kStorePitch + 16] * f1 + b1);
            v *= a.scale;
            if (a.softcap > 0.0f) v = a.softcap * quick_tanh(v / a.softcap);
            if (a.add != nullptr) {
                const float old = load_as_f32(a.add, m * a.add_stride + at, a.add_format);
                v = a.act != PK_ACT_NONE && !gated ? activate(old, a.act) * v : v + old;
            }
            store_from_f32(a.y, m * a.y_stride + at, a.y_format, v);
        }
    }
}
#endif

}  // namespace pk
