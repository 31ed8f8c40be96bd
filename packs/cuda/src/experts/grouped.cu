// Experts of many tokens on Hopper: persistent tiles of up to 128 pairs of one expert and 256 rows of its weights, by TMA and wgmma.
//
// x lies by positions, so that a tile is a box. A block: one producer thread, two consumer warpgroups that share x and have 128 rows
// of W each (with two stacks 64 of the gate and the same 64 of `up`), 64 pairs at a time; a tile of at most 64 pairs does half the work. e4m3: what 128 of K
// add up to is added with its scales, the warpgroups taking turns at the tensor cores, and the hidden values are narrowed in the
// epilogue: the two warpgroups tell each other the largest of a row. Assumes K padded with zeros to whole boxes, rows of hidden values in multiples of 128 (e4m3).
#include <cuda.h>

#include "../../include/device.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/grouped.cuh"
#include "../../include/ring_turn.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kPairs = kTileRows, kRows = 256, kRing = 4, kBoxBytes = 64 * 128;
constexpr int kStageBytes = (kPairs + kRows) * 128;
constexpr int kScaleBytes = kPairs * 4;
constexpr int kSharedBytes = kRing * (kStageBytes + kScaleBytes) + 1024;

struct Maps {
    CUtensorMap x, w[2];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void copy_expert_box(uint8_t *shared, const CUtensorMap *map, int x, int y, int expert, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)), "l"(map),
                 "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(expert)
                 : "memory");
}

__device__ __forceinline__ float activated(float v, int32_t act) {
    return act == PK_ACT_SILU ? __fdividef(v, 1.0f + __expf(-v)) : 0.5f * v * (1.0f + quick_tanh(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}
#endif

template <bool kFp8, bool kIsPair>
__global__ void __launch_bounds__(kThreads, 1) expert_grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ GroupedProduct p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kBoxK = kFp8 ? 128 : 64, kOut = kIsPair ? kRows / 2 : kRows;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    __shared__ float most_of[2][2][kPairs];  // by turns of tiles, of each warpgroup
    uint8_t *ring = raw + (-shared_address(raw) & 1023);
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kStageBytes);
    if (threadIdx.x == 0) {
        init_ring(full, empty, 2);
    }
    __syncthreads();
    wait_dependence();
    release_dependents();
    const int n_tiles = (p.n_rows + kOut - 1) / kOut, n_all = *p.n_items * n_tiles, n_steps = (p.k + kBoxK - 1) / kBoxK;
    // The items of the next tiles are asked for while this one is made.
    auto item_at = [&](int index) { return index < n_all ? reinterpret_cast<const int4 *>(p.items)[index / n_tiles] : make_int4(0, 0, 0, 0); };
    const int group = threadIdx.x >> 7;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            int4 item = item_at(blockIdx.x);
            for (int index = blockIdx.x; index < n_all; index += gridDim.x) {
                const int4 next = item_at(index + gridDim.x);
                const int place = item.w, first = item.y, n0 = p.first_row + index % n_tiles * kOut;
                const bool is_whole = item.z > 64;
                const int n_bytes = kRows * 128 + (is_whole ? 2 : 1) * kBoxBytes + (kFp8 ? kScaleBytes : 0);
                for (int k = 0; k < n_steps; ++k) {
                    uint64_t *barrier = full + stage;
                    barrier_wait(empty + stage, phase ^ 1);
                    barrier_expect(barrier, n_bytes);
                    if constexpr (kFp8) copy_bytes(shared_address(scale_ring + stage * kPairs), p.x_scales + k * p.scale_stride + first, kScaleBytes, barrier);
                    uint8_t *to = ring + stage * kStageBytes;
                    copy_box(to, &maps.x, k * kBoxK, first, barrier);
                    if (is_whole) copy_box(to + kBoxBytes, &maps.x, k * kBoxK, first + 64, barrier);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        copy_expert_box(to + (2 + i) * kBoxBytes, kIsPair ? maps.w + (i & 1) : maps.w, k * kBoxK, n0 + 64 * (kIsPair ? i >> 1 : i), place, barrier);
                    advance();
                }
                item = next;
            }
        }
        return;
    }
    more_registers<232>();
    const int wg = group - 1, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, c = lane & 3;
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    auto my_turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(2 + wg) : "memory"); };
    auto your_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(3 - wg) : "memory"); };
    if (kFp8 && wg == 1) your_turn();
    const uint32_t x_first = matrix_descriptor_low(shared_address(ring)), w_first = matrix_descriptor_low(shared_address(ring) + (2 + 2 * wg) * kBoxBytes);
    auto descriptor = [](uint32_t low) { return (uint64_t{0x40000040} << 32) | low; };
    // What a tile's weights are multiplied with: whole matrices, and (e4m3) blocks 32 i + lane of K.
    struct Factors {
        float whole[2], block[2];
    };
    auto block_row = [&](int index, int side) {
        const int row = p.first_row + index % n_tiles * kOut + (kIsPair ? 0 : 128 * wg);
        return min(row, p.w[side].rows - 1) >> 7;
    };
    auto blocks_of = [&](int place, int index, int side, int k) {
        const ExpertWeight &w = p.w[side];
        if (w.block_scale_at < 0) return 1.0f;
        return k + lane < n_steps ? __ldg(reinterpret_cast<const float *>(w.data + place * w.stride + w.block_scale_at) + block_row(index, side) * w.block_stride + k + lane) : 0.0f;
    };
    auto factors_of = [&](const int4 &item, int index) {
        Factors f = {};
        if (index >= n_all) return f;
#pragma unroll
        for (int side = 0; side < (kIsPair ? 2 : 1); ++side) {
            f.whole[side] = __ldg(reinterpret_cast<const float *>(p.w[side].data + item.w * p.w[side].stride + p.w[side].scale_at));
            if constexpr (kFp8) f.block[side] = blocks_of(item.w, index, side, 0);
        }
        return f;
    };
    int4 item = item_at(blockIdx.x), next_item = item_at(blockIdx.x + gridDim.x);
    Factors factors = factors_of(item, blockIdx.x);
    int turn = 0;
    for (int index = blockIdx.x; index < n_all; index += gridDim.x, turn ^= 1) {
        const int4 later_item = item_at(index + 2 * gridDim.x);
        const Factors next_factors = factors_of(next_item, index + gridDim.x);
        float acc[2][64];
        auto multiply = [&]<int kHalves>() {
            if constexpr (kFp8) {
                float part[64];
#pragma unroll
                for (int half = 0; half < kHalves; ++half)
#pragma unroll
                    for (int i = 0; i < 64; ++i) acc[half][i] = 0.0f;
                float block[2] = {factors.block[0], factors.block[1]};
                for (int k = 0; k < n_steps; ++k) {
                    if (k != 0 && (k & 31) == 0) {
                        block[0] = blocks_of(item.w, index, 0, k);
                        if (kIsPair) block[1] = blocks_of(item.w, index, 1, k);
                    }
                    const float ws0 = __shfl_sync(~0u, block[0], p.w[0].block_scale_at < 0 ? 0 : k & 31), ws1 = kIsPair ? __shfl_sync(~0u, block[1], p.w[0].block_scale_at < 0 ? 0 : k & 31) : ws0;
                    barrier_wait(full + stage, phase);
                    const uint32_t x_low = __shfl_sync(~0u, x_first + stage * (kStageBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + stage * (kStageBytes / 16), 0);
                    const float *scales = scale_ring + stage * kPairs + warp * 16 + (lane >> 2);
                    float xs[kHalves][2];
#pragma unroll
                    for (int half = 0; half < kHalves; ++half) {
                        xs[half][0] = scales[64 * half];
                        xs[half][1] = scales[64 * half + 8];
                    }
#pragma unroll
                    for (int half = 0; half < kHalves; ++half) {
                        my_turn();
                        wgmma_fence();
#pragma unroll
                        for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, descriptor(x_low + half * (kBoxBytes / 16) + 2 * i), descriptor(w_low + 2 * i), i > 0);
                        wgmma_commit();
                        your_turn();
                        wgmma_wait<0>();
#pragma unroll
                        for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
                        if (half == kHalves - 1) release(stage);
#pragma unroll
                        for (int j = 0; j < 16; ++j) {
                            const float w = j < 8 ? ws0 : ws1, f0 = xs[half][0] * w, f1 = xs[half][1] * w;
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
                    const uint32_t x_low = __shfl_sync(~0u, x_first + stage * (kStageBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + stage * (kStageBytes / 16), 0);
                    wgmma_fence();
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
#pragma unroll
                        for (int i = 0; i < 4; ++i) wgmma_bf16_n128(acc[half], descriptor(x_low + half * (kBoxBytes / 16) + 2 * i), descriptor(w_low + 2 * i), k > 0 || i > 0);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (previous >= 0) release(previous);
                    previous = stage;
                    advance();
                }
                wgmma_wait<0>();
                release(previous);
            }
        };
        // Stores the first kHalves halves of the tile.
        auto store = [&]<int kHalves>() {
            const int n0 = p.first_row + index % n_tiles * kOut, in_tile = warp * 16 + (lane >> 2);
            const uint8_t *matrix[2] = {p.w[0].data + item.w * p.w[0].stride, p.w[kIsPair].data + item.w * p.w[kIsPair].stride};
            auto row_scale = [&](int side, int row) { return __ldg(reinterpret_cast<const float *>(matrix[side] + p.w[side].row_scale_at) + min(row, p.w[side].rows - 1)); };
            if constexpr (kIsPair) {
                const int column = n0 + 64 * wg;
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    const bool is_scaled = p.w[0].row_scale_at >= 0;
#pragma unroll
                    for (int j = 0; j < 8; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float g = factors.whole[0], u = factors.whole[1];
                            if (is_scaled) {
                                g *= row_scale(0, column + 8 * j + 2 * c + e);
                                u *= row_scale(1, column + 8 * j + 2 * c + e);
                            }
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                float &v = acc[half][4 * j + 2 * h + e];
                                v = activated(v * g, p.act) * (acc[half][4 * (j + 8) + 2 * h + e] * u);
                            }
                        }
                }
                if constexpr (kFp8) {
                    float most[kHalves][2];
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float m = 0.0f;
#pragma unroll
                            for (int j = 0; j < 8; ++j) m = fmaxf(m, fmaxf(fabsf(acc[half][4 * j + 2 * h]), fabsf(acc[half][4 * j + 2 * h + 1])));
                            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                            most[half][h] = m;
                            if (c == 0) most_of[turn][wg][64 * half + 8 * h + in_tile] = m;
                        }
                    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int pair = 64 * half + 8 * h + in_tile;
                            const float m = fmaxf(most[half][h], most_of[turn][wg ^ 1][pair]), scale = m > 0.0f ? m / 448.0f : 1.0f, inverse = 1.0f / scale;
                            uint32_t codes[4];
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const float *v = acc[half] + 8 * i + 2 * h;
                                const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * inverse, v[1] * inverse), __NV_SATFINITE, __NV_E4M3);
                                const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[4] * inverse, v[5] * inverse), __NV_SATFINITE, __NV_E4M3);
                                codes[i] = low | high << 16;
                            }
                            // Lane c: columns 16 c to 16 c + 15, two groups of eight.
                            const uint4 t = gather_columns(codes[0], codes[1], codes[2], codes[3], c);
                            if (pair >= item.z) continue;
                            const uint4 v = make_uint4(__byte_perm(t.x, t.y, 0x5410), __byte_perm(t.z, t.w, 0x5410), __byte_perm(t.x, t.y, 0x7632), __byte_perm(t.z, t.w, 0x7632));
                            *reinterpret_cast<uint4 *>(p.out + (item.y + pair) * p.out_stride + column + 16 * c) = v;
                            if (c == 0 && wg == 0) p.out_scales[(n0 >> 7) * p.scale_stride + item.y + pair] = scale;
                        }
                } else {
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int pair = 64 * half + 8 * h + in_tile;
                            bf16 *out = reinterpret_cast<bf16 *>(p.out) + (item.y + pair) * p.out_stride + column + 8 * c;
#pragma unroll
                            for (int j = 0; j < 8; j += 4) {
                                const float *v = acc[half] + 4 * j + 2 * h;
                                const uint4 t = gather_columns(pack_bf16(v[0], v[1]), pack_bf16(v[4], v[5]), pack_bf16(v[8], v[9]), pack_bf16(v[12], v[13]), c);
                                if (pair < item.z && column + 8 * (j + c) < p.n_rows) *reinterpret_cast<uint4 *>(out + 8 * j) = t;
                            }
                        }
                }
            } else {
                const int column = n0 + 128 * wg - p.first_row;
                const bool is_scaled = p.w[0].row_scale_at >= 0;
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
#pragma unroll
                    for (int j = 0; j < 16; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float f = is_scaled ? factors.whole[0] * row_scale(0, p.first_row + column + 8 * j + 2 * c + e) : factors.whole[0];
                            acc[half][4 * j + e] *= f;
                            acc[half][4 * j + 2 + e] *= f;
                        }
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int pair = 64 * half + 8 * h + in_tile;
                        bf16 *out = reinterpret_cast<bf16 *>(p.out) + (item.y + pair) * p.out_stride + column + 8 * c;
#pragma unroll
                        for (int j = 0; j < 16; j += 4) {
                            const float *v = acc[half] + 4 * j + 2 * h;
                            const uint4 t = gather_columns(pack_bf16(v[0], v[1]), pack_bf16(v[4], v[5]), pack_bf16(v[8], v[9]), pack_bf16(v[12], v[13]), c);
                            if (pair < item.z && column + 8 * (j + c) < p.n_rows) *reinterpret_cast<uint4 *>(out + 8 * j) = t;
                        }
                    }
                }
            }
        };
        // Two copies of the loop: with a condition in it ptxas waits after every product.
        if (item.z > 64) {
            multiply.template operator()<2>();
            store.template operator()<2>();
        } else {
            multiply.template operator()<1>();
            store.template operator()<1>();
        }
        item = next_item;
        next_item = later_item;
        factors = next_factors;
    }
    if (kFp8 && wg == 0) my_turn();
#endif
}

// A warp: 512 (e4m3) or 256 (bf16) columns of a row.
template <bool kFp8>
__global__ void __launch_bounds__(256) expert_spread_kernel(const __grid_constant__ SpreadArguments a) {
    constexpr int kEach = kFp8 ? 16 : 8;
    wait_dependence();
    release_dependents();
    const int lane = threadIdx.x & 31, at = blockIdx.x * 8 + (threadIdx.x >> 5), row = at / a.n_chunks, first = (at - row * a.n_chunks) * 32 * kEach + lane * kEach;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    const bool is_in = first < a.out_stride;
    int places[2];  // of choices lane and 32 + lane
#pragma unroll
    for (int i = 0; i < 2; ++i) places[i] = lane + 32 * i < a.n_used ? a.rank[row * a.n_used + lane + 32 * i] : -1;
    uint4 v = make_uint4(0, 0, 0, 0);
    float scale = 1.0f;
    if constexpr (kFp8) {
        float x[2][8] = {};
        if (first < a.k) {
            load8(a.x, row * a.x_stride + first, a.x_format, x[0]);
            load8(a.x, row * a.x_stride + first + 8, a.x_format, x[1]);
        }
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) most = fmaxf(most, fabsf(x[i >> 3][i & 7]));
        for (int o = 1; o < 8; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        scale = most > 0.0f ? most / 448.0f : 1.0f;
        const float inverse = 1.0f / scale;
        uint32_t codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float *y = x[i >> 1] + 4 * (i & 1);
            const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(y[0] * inverse, y[1] * inverse), __NV_SATFINITE, __NV_E4M3);
            const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(y[2] * inverse, y[3] * inverse), __NV_SATFINITE, __NV_E4M3);
            codes[i] = low | high << 16;
        }
        v = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    } else if (first < a.k) {
        float x[8];
        load8(a.x, row * a.x_stride + first, a.x_format, x);
        v = pack8(x);
    }
    for (int i = 0; i < a.n_used; ++i) {
        const int place = __shfl_sync(~0u, places[i >> 5], i & 31);
        if (place < 0 || !is_in) continue;
        *reinterpret_cast<uint4 *>(a.out + (place * a.out_stride + first) * (kFp8 ? 1 : 2)) = v;
        if (kFp8 && (lane & 7) == 0) a.scales[(first >> 7) * a.scale_stride + place] = scale;
    }
}

int32_t make_map(const Launch &l, CUtensorMap *map, const void *data, bool is_fp8, int32_t n_dims, const cuuint64_t (&size)[3], const cuuint64_t (&stride)[2]) {
    const cuuint32_t box[3] = {is_fp8 ? 128u : 64u, 64u, 1u}, step[3] = {1, 1, 1};
    const CUresult e = l.ctx->driver.encode_tiled(map, is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, n_dims, const_cast<void *>(data), size, stride, box, step,
                                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return e == CUDA_SUCCESS ? PK_OK : fail(PK_DEVICE, "experts: tensor map of %llu x %llu, %llu bytes a row: CUDA driver error %d", (unsigned long long)size[1], (unsigned long long)size[0], (unsigned long long)stride[0], static_cast<int>(e));
}

template <bool kFp8, bool kIsPair>
int32_t run(const Launch &l, const GroupedProduct &p) {
    constexpr cuuint64_t kElement = kFp8 ? 1 : 2;
    Maps maps;
    const auto k = static_cast<cuuint64_t>(p.k);
    if (int32_t e = make_map(l, &maps.x, p.x, kFp8, 2, {k, static_cast<cuuint64_t>(p.positions), 1}, {static_cast<cuuint64_t>(p.x_stride) * kElement, 0})) return e;
    for (int i = 0; i < 2; ++i) {
        const ExpertWeight &w = p.w[kIsPair ? i : 0];
        if (int32_t e = make_map(l, &maps.w[i], w.data, kFp8, 3, {static_cast<cuuint64_t>(w.row_bytes) / kElement, static_cast<cuuint64_t>(w.rows), static_cast<cuuint64_t>(p.n_places)},
                                 {static_cast<cuuint64_t>(w.row_bytes), static_cast<cuuint64_t>(p.n_places > 1 ? w.stride : w.row_bytes)}))
            return e;
    }
    return launch(l, "expert_grouped", expert_grouped_kernel<kFp8, kIsPair>, dim3(l.ctx->n_processors), dim3(kThreads), kSharedBytes, maps, p);
}

}  // namespace

int32_t launch_grouped(const Launch &l, const GroupedProduct &p, bool is_fp8, bool is_pair) {
    return is_fp8 ? is_pair ? run<true, true>(l, p) : run<true, false>(l, p) : is_pair ? run<false, true>(l, p) : run<false, false>(l, p);
}

int32_t launch_spread(const Launch &l, SpreadArguments a, bool is_fp8, int64_t max_rows) {
    const int64_t each = is_fp8 ? 512 : 256;
    a.info = l.info;
    a.n_chunks = static_cast<int32_t>((a.out_stride + each - 1) / each);
    const dim3 blocks(static_cast<unsigned>((max_rows * a.n_chunks + 7) / 8));
    return is_fp8 ? launch(l, "expert_spread", expert_spread_kernel<true>, blocks, dim3(256), 0, a) : launch(l, "expert_spread", expert_spread_kernel<false>, blocks, dim3(256), 0, a);
}

}  // namespace pk
