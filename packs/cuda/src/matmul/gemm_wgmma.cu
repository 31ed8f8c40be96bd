// Tiled matmul on Hopper: y[rows, N] = x[rows, K] W^T with TMA, an mbarrier ring and wgmma, for more than 64 rows.
//
// Block: one producer thread that copies boxes, two consumer warpgroups; persistent over tiles, grouped so that concurrent
// blocks share boxes in L2. BF16: 128 x 256 tiles, 64 of K a stage, 64 rows a warpgroup. FP8: 256 x 128 tiles, 128 of K a
// stage, 128 rows a warpgroup in two halves; what 128 of K add up to is added with its scales (x: per row and 128 of K; W: per
// 128 x 128), so that the tensor core's short accumulator never sums more than 128 products; the warpgroups take turns, so that
// one multiplies while the other adds. With an activation the first half of a tile is gate, the second up. Assumes swizzled
// 128-byte boxes (K padded to whole boxes). Does not handle: fewer rows than min_rows.
#include "../../include/gemm_boxes.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kPitch = 36, kOutBytes = 8 * 16 * kPitch * 4;
template <bool kFp8> constexpr int kM = kFp8 ? 256 : 128;
template <bool kFp8> constexpr int kGroupM = 2048 / kM<kFp8>;  // tiles of x that go through W together
template <bool kFp8> constexpr int kN = kFp8 ? 128 : 256;
constexpr int kRing = 4;
template <bool kFp8> constexpr int kStageBytes = (kM<kFp8> + kN<kFp8>) * 128;
template <bool kFp8> constexpr int kScaleBytes = kFp8 ? kM<kFp8> * 4 : 0;  // of a stage: one per row of x
template <bool kFp8> constexpr int kSharedBytes = kRing * (kStageBytes<kFp8> + kScaleBytes<kFp8>) + 1024 + kOutBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Pairs of columns, word i of lane c of four neighbours: columns 8i + 2c. Lane c gets the words of columns 8c to 8c + 7.
__device__ __forceinline__ uint4 gather_columns(uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3, int c) {
    const bool odd = c & 1, high = c & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? v0 : v1, 1), b = __shfl_xor_sync(~0u, odd ? v2 : v3, 1);
    const uint32_t w0 = odd ? a : v0, w1 = odd ? v1 : a, w2 = odd ? b : v2, w3 = odd ? v3 : b;
    const uint32_t d = __shfl_xor_sync(~0u, high ? w0 : w2, 2), e = __shfl_xor_sync(~0u, high ? w1 : w3, 2);
    return high ? make_uint4(d, e, w2, w3) : make_uint4(w0, w1, d, e);
}

// Stores a whole tile's accumulators of rows `row` and row + 8, columns 8j + 2c and the next; false when this is no usual case.
template <int kTileN>
__device__ __forceinline__ bool direct_store(const GemmArguments &a, int weight, bool gated, int n0, int row, int c, int n_rows, const float (&acc)[kTileN / 2]) {
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
    constexpr int kFlight = 8;  // loads under way
    if constexpr (kTileN > 128) {
        // F32, where registers are few: two columns a lane.
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
                    const float *v = acc + 4 * (first + j) + 2 * h;
                    if (in[h]) *reinterpret_cast<float2 *>(y + 8 * h * a.y_stride + 8 * (first + j)) = make_float2(v[0] * f + old[j].x, v[1] * f + old[j].y);
                }
            }
        return true;
    }
    // F32: lanes 2i and 2i + 1 share columns of two neighbouring groups of eight, so that each has four in a row.
    if (((a.y_stride | a.add_stride | w.first_column) & 3) != 0 || ((reinterpret_cast<uintptr_t>(a.y) | reinterpret_cast<uintptr_t>(a.add)) & 15) != 0) return false;
    const bool odd = c & 1;
    const int64_t to = row * a.y_stride + w.first_column + n0 + 8 * odd + 2 * (c & 2), from = row * a.add_stride + w.first_column + n0 + 8 * odd + 2 * (c & 2);
    float *y = static_cast<float *>(a.y) + to;
    const float *add = static_cast<const float *>(a.add) + from;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int first = 0; first < kTileN / 8; first += 2 * kFlight) {
            float4 old[kFlight];
#pragma unroll
            for (int j = 0; j < kFlight; ++j) old[j] = in[h] && a.add != nullptr ? __ldcg(reinterpret_cast<const float4 *>(add + 8 * h * a.add_stride + 8 * (first + 2 * j))) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int j = 0; j < kFlight; ++j) {
                const float *v = acc + 4 * (first + 2 * j) + 2 * h;  // 0, 1 of one group, 4, 5 of the next
                const float p = __shfl_xor_sync(~0u, odd ? v[0] : v[4], 1), q = __shfl_xor_sync(~0u, odd ? v[1] : v[5], 1);
                const float4 o = odd ? make_float4(p, q, v[4], v[5]) : make_float4(v[0], v[1], p, q);
                if (in[h]) __stcg(reinterpret_cast<float4 *>(y + 8 * h * a.y_stride + 8 * (first + 2 * j)), make_float4(o.x * f + old[j].x, o.y * f + old[j].y, o.z * f + old[j].z, o.w * f + old[j].w));
            }
        }
    return true;
}
#endif

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) gemm_wgmma_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kTileN = kN<kFp8>, kRows = kM<kFp8>, kBytes = kStageBytes<kFp8>, kBoxK = kFp8 ? 128 : 64, kHalf = kTileN / 2;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kBytes);
    float *out_tile = scale_ring + kRing * kScaleBytes<kFp8> / 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol);
    if (n_rows < a.min_rows) return;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int m_tiles = (n_rows + kRows - 1) / kRows, n_all = m_tiles * a.n_tiles, n_steps = (a.k + kBoxK - 1) / kBoxK;
    auto tile_of = [&](int index) { return gemm_tile<kRows, kTileN, kGroupM<kFp8>>(a, index, m_tiles, gated); };
    const int group = threadIdx.x >> 7;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            for (int index = blockIdx.x; index < n_all; index += gridDim.x) {
                const GemmTile t = tile_of(index);
                const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
                for (int k = 0; k < n_steps; ++k) {
                    barrier_wait(empty + stage, phase ^ 1);
                    barrier_expect(full + stage, kBytes + kScaleBytes<kFp8>);
                    if constexpr (kFp8) copy_bytes(shared_address(scale_ring + stage * kRows), a.x_scale + k * a.x_scale_stride + t.m0, kScaleBytes<kFp8>, full + stage);
                    uint8_t *to = ring + stage * kBytes;
                    copy_box(to, &maps.x, k * kBoxK, t.m0, full + stage);
                    copy_box(to + kRows * 128, first, k * kBoxK, t.n0, full + stage);
                    copy_box(to + (kRows + kHalf) * 128, second, k * kBoxK, gated ? t.n0 : t.n0 + kHalf, full + stage);
                    advance();
                }
            }
        }
    } else {
    more_registers<232>();
    // Turns of the two warpgroups, of FP8.
    auto my_turn = [](int wg) { asm volatile("bar.sync %0, 256;" ::"r"(2 + wg) : "memory"); };
    auto your_turn = [](int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - wg) : "memory"); };
    const int wg = group - 1, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    if (kFp8 && wg == 1) your_turn(wg);
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * (kRows / 2) * 128);
    for (int index = blockIdx.x; index < n_all; index += gridDim.x) {
        const GemmTile t = tile_of(index);
        constexpr int kHalves = kRows / 128;  // of 64 rows, of a warpgroup
        float acc[kHalves][kTileN / 2];
        if constexpr (kFp8) {
            float part[kTileN / 2];
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) acc[half][i] = 0.0f;
            const GemmWeight &w0 = a.w[t.weight], &w1 = a.w[gated ? 1 : t.weight];
            const float *s0 = w0.block_scale ? w0.block_scale + (t.n0 >> 7) * w0.block_stride : nullptr;
            const float *s1 = w1.block_scale ? w1.block_scale + (t.n0 >> 7) * w1.block_stride : nullptr;
            // A lane keeps the weights' scales of stage 32 i + lane, and the next ones; read by shuffles, they are there in time.
            auto scales_of = [&](const float *s, int k) { return s == nullptr ? 1.0f : k + lane < n_steps ? __ldg(s + k + lane) : 0.0f; };
            float w_now[2] = {}, w_next[2] = {scales_of(s0, 0), gated ? scales_of(s1, 0) : 0.0f};
            for (int k = 0; k < n_steps; ++k) {
                if ((k & 31) == 0) {
                    w_now[0] = w_next[0];
                    w_now[1] = w_next[1];
                    w_next[0] = scales_of(s0, k + 32);
                    if (gated) w_next[1] = scales_of(s1, k + 32);
                }
                const float ws0 = __shfl_sync(~0u, w_now[0], k & 31), ws1 = gated ? __shfl_sync(~0u, w_now[1], k & 31) : ws0;
                barrier_wait(full + stage, phase);
                // Descriptors differ in the low word only.
                const uint32_t x_low = x_first + stage * (kBytes / 16), w_low = w_first + stage * (kBytes / 16);
                const float *scales = scale_ring + stage * kRows + wg * (kRows / 2) + warp * 16 + (lane >> 2);
                float xs[kHalves][2];
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    xs[half][0] = scales[64 * half];
                    xs[half][1] = scales[64 * half + 8];
                }
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    // One warpgroup's products run while the other adds.
                    my_turn(wg);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, (uint64_t{0x40000040} << 32) | (x_low + 512 * half + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 2 * i), i > 0);
                    wgmma_commit();
                    your_turn(wg);
                    wgmma_wait<0>();
#pragma unroll
                    for (int i = 0; i < kTileN / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
                    if (half == kHalves - 1) release(stage);
#pragma unroll
                    for (int j = 0; j < kTileN / 8; ++j) {
                        const float w = j < kTileN / 16 ? ws0 : ws1, f0 = xs[half][0] * w, f1 = xs[half][1] * w;
                        acc[half][4 * j] = fmaf(f0, part[4 * j], acc[half][4 * j]);
                        acc[half][4 * j + 1] = fmaf(f0, part[4 * j + 1], acc[half][4 * j + 1]);
                        acc[half][4 * j + 2] = fmaf(f1, part[4 * j + 2], acc[half][4 * j + 2]);
                        acc[half][4 * j + 3] = fmaf(f1, part[4 * j + 3], acc[half][4 * j + 3]);
                    }
                }
                advance();
            }
        } else {
            int previous = -1;
            for (int k = 0; k < n_steps; ++k) {
                barrier_wait(full + stage, phase);
                const uint32_t x_low = x_first + stage * (kBytes / 16), w_low = w_first + stage * (kBytes / 16);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) wgmma_bf16_n256(acc[0], (uint64_t{0x40000040} << 32) | (x_low + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 2 * i), k > 0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = stage;
                advance();
            }
            wgmma_wait<0>();
            release(previous);
        }
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
        const int m_first = t.m0 + wg * (kRows / 2) + 64 * half + warp * 16;
        // The usual cases straight from the registers, two neighbours a store: whole tiles without scales per column or bias.
        if (direct_store<kTileN>(a, t.weight, gated, t.n0, m_first + (lane >> 2), lane & 3, n_rows, acc[half])) continue;
        // Sixteen rows x 32 columns at a time through shared memory (gated: 16 of gate, 16 of up), so that one copy of the
        // epilogue serves all accumulators and lanes store neighbouring columns.
        float *mine = out_tile + (threadIdx.x / 32 - 4) * 16 * kPitch;
        const GemmWeight &w = a.w[t.weight];
        const int wide = gated ? 16 : 32, n_chunks = kTileN / 32;
#pragma unroll 1
        for (int chunk = 0; chunk < n_chunks; ++chunk) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < kTileN / 32; ++c) {
                if (c != chunk) continue;
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int plain = 4 * c + q, twin = 2 * c + (q & 1) + (q >> 1) * (kTileN / 16);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        mine[((lane >> 2) + 8 * (e >> 1)) * kPitch + 8 * q + 2 * (lane & 3) + (e & 1)] = gated ? acc[half][4 * twin + e] : acc[half][4 * plain + e];
                }
            }
            __syncwarp();
            const int column = t.n0 + chunk * wide + (lane & (wide - 1));
            if (column >= w.rows) continue;
            const float f0 = w.scale * (w.row_scale ? w.row_scale[column] : 1.0f), b0 = w.bias ? w.bias[column] : 0.0f;
            const float f1 = gated ? a.w[1].scale * (a.w[1].row_scale ? a.w[1].row_scale[column] : 1.0f) : 0.0f, b1 = gated && a.w[1].bias ? a.w[1].bias[column] : 0.0f;
            const int n_here = min(16, n_rows - m_first);
            const float *from = mine + (lane & (wide - 1));
            const int64_t at = w.first_column + column;
            if (a.act == PK_ACT_NONE && a.softcap <= 0.0f && n_here == 16 && (a.add == nullptr || a.add_format == PK_F32)) {
                // The usual cases, without a decision per element: bf16, or f32 with the residual added.
                const float f = f0 * a.scale, b = b0 * a.scale;
                if (a.y_format == PK_BF16 && a.add == nullptr) {
                    bf16 *to = static_cast<bf16 *>(a.y) + m_first * a.y_stride + at;
#pragma unroll
                    for (int r = 0; r < 16; ++r) to[r * a.y_stride] = __float2bfloat16(from[r * kPitch] * f + b);
                    continue;
                }
                if (a.y_format == PK_F32) {
                    float *to = static_cast<float *>(a.y) + m_first * a.y_stride + at, old[16];
                    const float *add = static_cast<const float *>(a.add) + m_first * a.add_stride + at;
#pragma unroll
                    for (int r = 0; r < 16; ++r) old[r] = a.add ? add[r * a.add_stride] : 0.0f;
#pragma unroll
                    for (int r = 0; r < 16; ++r) to[r * a.y_stride] = from[r * kPitch] * f + b + old[r];
                    continue;
                }
            }
            if (gated && a.act == PK_ACT_SILU && a.softcap <= 0.0f && a.add == nullptr && a.y_format == PK_BF16 && n_here == 16) {
                bf16 *to = static_cast<bf16 *>(a.y) + (m_first + (lane >> 4)) * a.y_stride + at;
                from += (lane >> 4) * kPitch;
#pragma unroll
                for (int r = 0; r < 16; r += 2) {
                    const float g = from[r * kPitch] * f0 + b0, u = from[r * kPitch + 16] * f1 + b1;
                    to[r * a.y_stride] = __float2bfloat16(__fdividef(g, 1.0f + __expf(-g)) * u * a.scale);
                }
                continue;
            }
#pragma unroll 1
            for (int r = gated ? lane >> 4 : 0; r < n_here; r += gated ? 2 : 1) {
                const int m = m_first + r;
                float v = from[r * kPitch] * f0 + b0;
                if (gated) v = activate(v, a.act) * (from[r * kPitch + 16] * f1 + b1);
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
    }
    if (kFp8 && wg == 0) my_turn(wg);
    }
#endif
}

template <bool kFp8>
int32_t launch_tiles(const Launch &l, GemmArguments a, int64_t max_rows, int64_t x_cols) {
    GemmMaps maps;
    if (int32_t e = gemm_maps<kM<kFp8>, kN<kFp8>>(l, &maps, a, max_rows, x_cols, kFp8)) return e;
    const int64_t all = (max_rows + kM<kFp8> - 1) / kM<kFp8> * a.n_tiles;
    const unsigned blocks = static_cast<unsigned>(all < l.ctx->n_processors ? all : l.ctx->n_processors);
    return launch(l, "gemm_wgmma", gemm_wgmma_kernel<kFp8>, dim3(blocks), dim3(kThreads), kSharedBytes<kFp8>, maps, a);
}

}  // namespace

bool has_wgmma(const pk_ctx *ctx) {
#if defined(PK_WGMMA)
    return ctx->capability == 90;
#else
    (void)ctx;
    return false;
#endif
}

int32_t launch_gemm_wgmma(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (a.x_scale == nullptr) return launch_tiles<false>(l, a, max_rows, a.k);
    Launch own = l;
    own.overlap = true;  // the product's blocks set themselves up while x is narrowed
    return launch_tiles<true>(own, a, max_rows, (a.k + 127) / 128 * 128);
}

}  // namespace pk
