// Tiled matmul on Hopper for 129 to 1,536 rows in BF16: y[rows, N] = x[rows, K] W^T, with tiles that fill the device in as few waves as can be.
//
// A tile is up to 256 rows of x by 192 or 128 rows of W, or 320 by 128, in units of 64 rows that two consumer warpgroups take by turns;
// one thread asks for boxes. A step's units are dealt out among tiles alike, so that no more is multiplied than there is. Few tiles are cut along K among blocks: these lay
// their sums into L2, in pieces of 64 rows by 32 columns, and every block adds and stores a share of the pieces, in one order. Blocks wait for
// each other, so that a cut launch never has more blocks than processors. Weights of the first stages are asked for before the kernels ahead
// are done. With an activation the first half of a tile is gate, the second up. Assumes swizzled 128-byte boxes (K padded to whole boxes).
// Does not handle: what is_tall refuses.
#include <algorithm>

#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/once.cuh"
#include "../../include/ring_turn.cuh"
#include "../../include/wgmma_n192.cuh"

namespace pk {
namespace {

constexpr int kGroups = 2, kConsumers = 128 * kGroups, kThreads = kConsumers + 128, kStages = 4, kPiece = 32, kMostParts = 8, kFactorWarps = 3;
constexpr int kPieceFloats = 64 * kPiece;
constexpr int64_t kLeastWeights = 8 << 20;

// What lies behind the ring.
struct TallBeside {
    alignas(16) float factors[kClusterRows];  // of rows of x, by what a norm left
    uint64_t full[kStages], empty[kStages], are_factored;
    volatile int32_t true_rows;
};

// kUnits: of a tile at most. A box of x has 256 rows at most.
template <int kWidth, int kUnits>
struct TallShape {
    static constexpr int kTileRows = 64 * kUnits, kOfGroup = (kUnits + 1) / kGroups, kXBoxes = (kUnits + 3) / 4;
    static constexpr int kPieces = kWidth / kPiece, kStageBytes = (kTileRows + kWidth) * 128, kBytes = kStages * kStageBytes + sizeof(TallBeside);
    static constexpr int64_t kPartBytes = int64_t{kTileRows} * kWidth * 4;  // of one part of a tile
};

// How rows are cut into tiles, and of how many units one is at most; and tiles along K: parts, where their sums lie, and two counters a tile, zero between launches.
struct TallCut {
    float *parts;
    int32_t *counters;
    int32_t n_parts, m_tiles, units;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }
__device__ __forceinline__ void barrier_more(uint64_t *b, int bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory"); }
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void store_if(bool does, float *to, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.v4.f32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(static_cast<int>(does)), "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// From L2 or from shared memory; else zeros.
__device__ __forceinline__ float4 load_if(bool does, const float *from) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n@p ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%5];\n}\n" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w) : "r"(static_cast<int>(does)), "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void wait_for(int32_t *counter, int n) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen != n);
}

// Column n of all weights side by side: whose it is. first_tile counts columns here.
__device__ __forceinline__ int weight_of(const GemmArguments &a, int n) { return a.n_w > 2 && n >= a.w[2].first_tile ? 2 : a.n_w > 1 && n >= a.w[1].first_tile ? 1 : 0; }

// Factors of all rows by what a norm left: 1 / rms, squares of 64 columns each. One of three warps: 32 rows at a time, a quarter of the squares a lane.
__device__ __forceinline__ void tall_factors(const HalfNorm &norm, int warp, int lane, float (&factors)[kClusterRows]) {
#pragma unroll 1
    for (int row = 32 * warp + 4 * (lane & 7); row - 4 * (lane & 7) < norm.stride; row += 32 * kFactorWarps) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < norm.stride) {
#pragma unroll 2
            for (int p = lane >> 3; p < norm.n_cols / 64; p += 4) {
                const float4 v = __ldcg(reinterpret_cast<const float4 *>(norm.row_squares + p * norm.stride + row));
                sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
            }
        }
        auto all = [](float v) {
            v += __shfl_xor_sync(~0u, v, 8);
            return v + __shfl_xor_sync(~0u, v, 16);
        };
        sum = make_float4(all(sum.x), all(sum.y), all(sum.z), all(sum.w));
        auto factor = [&](float v) { return rsqrtf(v / norm.n_cols + norm.eps); };
        if (lane < 8 && row < norm.stride) *reinterpret_cast<float4 *>(factors + row) = make_float4(factor(sum.x), factor(sum.y), factor(sum.z), factor(sum.w));
    }
    __syncwarp();
}

// Stores 32 columns from column n on: rows `row` and row + 8 below `end`, columns 8j + 2c and the next.
__device__ __forceinline__ void store_piece(const GemmArguments &a, int n, int row, int c, int end, float factor, float factor8, const float (&sums)[16]) {
    const GemmWeight &w = a.w[weight_of(a, n)];
    n -= w.first_tile;
    if (n >= w.rows) return;
    const float f[2] = {w.scale * a.scale * factor, w.scale * a.scale * factor8};
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = sums[i] * f[i >> 1 & 1];
    if (w.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] += __ldg(w.bias + n + 8 * (i / 4) + 2 * c + (i & 1)) * a.scale;
    }
    const bool in[2] = {row < end, row + 8 < end};
    n += w.first_column;
    if (a.y_format == PK_BF16) {
        bf16 *y = static_cast<bf16 *>(a.y) + row * a.y_stride + n + 8 * c;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 p = gather_columns(pack_bf16(v[2 * h], v[2 * h + 1]), pack_bf16(v[4 + 2 * h], v[5 + 2 * h]), pack_bf16(v[8 + 2 * h], v[9 + 2 * h]), pack_bf16(v[12 + 2 * h], v[13 + 2 * h]), c);
            if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride) = p;
        }
        return;
    }
    // Lanes 2i and 2i + 1 share columns of two neighbouring groups of eight, so that each has four in a row.
    const bool odd = c & 1, in_memory = a.add == a.y && a.add_stride == a.y_stride;
    n += 8 * odd + 2 * (c & 2);
    float *y = static_cast<float *>(a.y) + row * a.y_stride + n;
    const float *add = static_cast<const float *>(a.add) + row * a.add_stride + n;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = 8 * j + 2 * h;
            const float p = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 4], 1), q = __shfl_xor_sync(~0u, odd ? v[i + 1] : v[i + 5], 1);
            float4 sum = odd ? make_float4(p, q, v[i + 4], v[i + 5]) : make_float4(v[i], v[i + 1], p, q);
            float *at = y + 8 * h * a.y_stride + 16 * j;
            if (!in[h]) continue;
            if (in_memory) {
                add_in_memory(at, sum);
                continue;
            }
            if (a.add != nullptr) {
                const float4 old = __ldcg(reinterpret_cast<const float4 *>(add + 8 * h * a.add_stride + 16 * j));
                sum = make_float4(sum.x + old.x, sum.y + old.y, sum.z + old.z, sum.w + old.w);
            }
            __stcg(reinterpret_cast<float4 *>(at), sum);
        }
}

// As store_piece, of a whole gated tile: half of the columns from column n of gate on, half from there of up.
template <int kWidth, int kAct>
__device__ __forceinline__ void store_gated(const GemmArguments &a, int n, int row, int c, int end, float factor, float factor8, const float (&acc)[kWidth / 2]) {
    const float f[2] = {a.w[0].scale * factor, a.w[0].scale * factor8}, g[2] = {a.w[1].scale * a.scale * factor, a.w[1].scale * a.scale * factor8};
    const bool in[2] = {row < end, row + 8 < end};
    bf16 *y = static_cast<bf16 *>(a.y) + row * a.y_stride + a.w[0].first_column + n + 8 * c;
#pragma unroll
    for (int j = 0; j < kWidth / 16; j += 4) {
        if (n + 8 * j >= a.w[0].rows) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            auto pair = [&](int i) {
                float v[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float gate = acc[4 * i + 2 * h + e] * f[h];
                    v[e] = (kAct == PK_ACT_SILU ? __fdividef(gate, 1.0f + __expf(-gate)) : activate(gate, kAct)) * acc[4 * (i + kWidth / 16) + 2 * h + e] * g[h];
                }
                return pack_bf16(v[0], v[1]);
            };
            const uint4 p = gather_columns(pair(j), pair(j + 1), pair(j + 2), pair(j + 3), c);
            if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride + 8 * j) = p;
        }
    }
}
#endif

enum Way { kSilu, kGelu, kWhole, kCut, kFront };  // kFront: cut, and in front of a norm

// Rows of W in a box.
constexpr int box_rows(int width, Way way) { return way == kSilu || way == kGelu ? width / 2 : 64; }

template <int kWidth, int kUnits, Way kWay>
__global__ void __launch_bounds__(kThreads, 1) gemm_tall_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a, const __grid_constant__ TallCut cut) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = TallShape<kWidth, kUnits>;
    extern __shared__ __align__(1024) uint8_t ring[];
    TallBeside &beside = *reinterpret_cast<TallBeside *>(ring + kStages * S::kStageBytes);
    uint64_t(&full)[kStages] = beside.full, (&empty)[kStages] = beside.empty;
    constexpr int kBox = box_rows(kWidth, kWay);
    constexpr bool gated = kWay == kSilu || kWay == kGelu, is_cut = kWay == kCut || kWay == kFront;
    const int n_parts = is_cut ? cut.n_parts : 1, first = blockIdx.x / n_parts, part = blockIdx.x - first * n_parts, stride = gridDim.x / n_parts;
    const int n_steps = (a.k + 63) / 64, k0 = n_steps * part / n_parts, last_k = n_steps * (part + 1) / n_parts;
    const int m_tiles = cut.m_tiles, n_all = m_tiles * a.n_tiles;
    if (threadIdx.x == 0) {
        barrier_init(&beside.are_factored, kFactorWarps);
        init_ring(full, empty, kGroups);
    }
    __syncthreads();
    release_dependents();
    // The first unit of a tile of rows, of a step that has so many rows.
    auto unit_of = [&](int m, int n_rows) { return (n_rows + 63) / 64 * m / m_tiles; };
    // The tile of rows of number `index`: of another height every time that a block comes to one.
    const bool turns = stride % m_tiles == 0;
    auto row_tile = [&](int index) { return (index + (turns ? index / stride : 0)) % m_tiles; };
    RingTurn<kStages> in_ring;
    if (threadIdx.x >= kConsumers) {
        fewer_registers<40>();
        const int warp = (threadIdx.x - kConsumers) >> 5;
        if (warp > 0 && a.norm.row_squares != nullptr) {
            wait_dependence();
            tall_factors(a.norm, warp - 1, threadIdx.x & 31, beside.factors);
            if ((threadIdx.x & 31) == 0) barrier_arrive(&beside.are_factored);
        }
        if (threadIdx.x > kConsumers) return;
        const uint64_t policy = m_tiles == 1 ? kReadOnce : kReadOften;
        auto copy_weights = [&](int tile, int k, int stage) {
            barrier_more(full + stage, kWidth * 128);
            const uint32_t to = shared_address(ring + stage * S::kStageBytes + S::kTileRows * 128);
#pragma unroll
            for (int b = 0; b < kWidth / kBox; ++b) {
                const int n = tile * (gated ? kWidth / 2 : kWidth) + (gated ? 0 : b * kBox), i = gated ? b : weight_of(a, n);
                copy_box_once(to + b * kBox * 128, maps.w + i, k * 64, n - a.w[i].first_tile, full + stage, policy);
            }
        };
        int n_ahead = 0;
        if (first < n_all) {
            n_ahead = min(kStages, last_k - k0);
            for (int i = 0; i < n_ahead; ++i) copy_weights(first / m_tiles, k0 + i, i);
            prefetch_map(&maps.x);
        }
        wait_dependence();
        const int n_rows = rows_of(a.info, a.rows_symbol), box = cut.units * 64 / S::kXBoxes;
        for (int index = first; index < n_all; index += stride) {
            const int tile = index / m_tiles, m = row_tile(index), row = m == 0 ? 0 : unit_of(m, n_rows) * 64;
#pragma unroll 1
            for (int k = k0; k < last_k; ++k) {
                if (--n_ahead < 0) {
                    barrier_wait(empty + in_ring.stage, in_ring.phase ^ 1);
                    copy_weights(tile, k, in_ring.stage);
                }
                barrier_expect(full + in_ring.stage, S::kXBoxes * box * 128);
#pragma unroll
                for (int b = 0; b < S::kXBoxes; ++b) copy_box(ring + in_ring.stage * S::kStageBytes + b * box * 128, &maps.x, k * 64, row + b * box, full + in_ring.stage);
                in_ring.advance();
            }
        }
        return;
    }
    more_registers<232>();
    const int wg = threadIdx.x >> 7, lane = threadIdx.x & 31;
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    constexpr uint64_t kHigh = uint64_t{0x40000040} << 32;
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + S::kTileRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * 64 * 128);
    wait_dependence();
    if (threadIdx.x == 0) beside.true_rows = rows_of(a.info, a.rows_symbol);
    consumers_meet();
    const int n_rows = beside.true_rows;
    // What sums of a row are multiplied by.
    auto factor_of = [&](int row) { return a.norm.row_squares != nullptr ? beside.factors[row] : 1.0f; };
#pragma unroll 1
    for (int index = first; index < n_all; index += stride) {
        const int tile = index / m_tiles, m = row_tile(index);
        const int first_unit = unit_of(m, n_rows), n_true = unit_of(m + 1, n_rows) - first_unit, n_units = max(1, n_true);
        const int c = lane & 3, row_in_unit = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2), end = min(n_rows, (first_unit + n_true) * 64);
        // Sums of units wg, wg + 2 and so on.
        float acc[S::kOfGroup][kWidth / 2];
#pragma unroll
        for (int u = 0; u < S::kOfGroup; ++u)
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) acc[u][i] = 0.0f;
        auto multiply = [&](auto n) {
            int previous = -1;
#pragma unroll 1
            for (int k = k0; k < last_k; ++k) {
                barrier_wait(full + in_ring.stage, in_ring.phase);
                const uint32_t x_low = __shfl_sync(~0u, x_first + in_ring.stage * (S::kStageBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + in_ring.stage * (S::kStageBytes / 16), 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int u = 0; u < decltype(n)::value; ++u) Wgmma<kWidth>::shared(acc[u], kHigh | (x_low + u * (2 * 64 * 128 / 16) + 2 * i), kHigh | (w_low + 2 * i), 1);
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = in_ring.stage;
                in_ring.advance();
            }
            wgmma_wait<0>();
            release(previous);
        };
        const int n_own = (n_units - wg + 1) / kGroups;
        if (S::kOfGroup > 2 && n_own > 2) {
            multiply(std::integral_constant<int, S::kOfGroup>());
        } else if (n_own > 1) {
            multiply(std::integral_constant<int, 2>());
        } else if (n_own > 0) {
            multiply(std::integral_constant<int, 1>());
        } else {
#pragma unroll 1
            for (int k = k0; k < last_k; ++k) {
                barrier_wait(full + in_ring.stage, in_ring.phase);
                release(in_ring.stage);
                in_ring.advance();
            }
        }
        if (a.norm.row_squares != nullptr) barrier_wait(&beside.are_factored, 0);
        const int n_pieces = max(0, n_true) * S::kPieces, mine = (threadIdx.x & 127) * 4;
        float *own = reinterpret_cast<float *>(ring) + mine, *of_tile = cut.parts + static_cast<int64_t>(index) * n_parts * kUnits * S::kPieces * kPieceFloats + mine;
        if constexpr (is_cut) consumers_meet();
        // A unit is stored, or laid where whoever adds it up finds it.
        auto leave = [&](int unit, const float (&own_sums)[kWidth / 2]) {
            const int row = (first_unit + unit) * 64 + row_in_unit;
            if constexpr (gated) {
                store_gated<kWidth, kWay == kSilu ? PK_ACT_SILU : PK_ACT_GELU_TANH>(a, tile * (kWidth / 2), row, c, end, factor_of(row), factor_of(row + 8), own_sums);
            } else if constexpr (kWay == kWhole) {
#pragma unroll
                for (int g = 0; g < S::kPieces; ++g) {
                    float sums[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) sums[i] = own_sums[16 * g + i];
                    store_piece(a, tile * kWidth + g * kPiece, row, c, end, factor_of(row), factor_of(row + 8), sums);
                }
            } else {
                // Two pieces side by side are number i for part i % n_parts to add: its own lie in the ring, which everybody is through with.
                int piece = unit * S::kPieces, turn = piece / 2 / n_parts, owner = piece / 2 - turn * n_parts;
#pragma unroll
                for (int g = 0; g < S::kPieces; ++g) {
                    float *to = owner == part ? own + (2 * turn + g % 2) * kPieceFloats : of_tile + (part * kUnits * S::kPieces + piece) * kPieceFloats;
#pragma unroll
                    for (int j = 0; j < 4; ++j) store_if(piece < n_pieces, to + j * 512, own_sums[16 * g + 4 * j], own_sums[16 * g + 4 * j + 1], own_sums[16 * g + 4 * j + 2], own_sums[16 * g + 4 * j + 3]);
                    ++piece;
                    if (g % 2 && ++owner == n_parts) {
                        owner = 0;
                        ++turn;
                    }
                }
            }
        };
        if constexpr (S::kOfGroup > 2) {
#pragma unroll
            for (int u = 0; u < S::kOfGroup; ++u)
                if (u < n_own) leave(wg + 2 * u, acc[u]);
        } else {
            // One copy of the code for both.
#pragma unroll 1
            for (int unit = wg; unit < n_units; unit += 2) {
                leave(unit, acc[0]);
#pragma unroll
                for (int i = 0; i < kWidth / 2; ++i) acc[0][i] = acc[1][i];
            }
        }
        if constexpr (is_cut) {
            consumers_meet();
            if (threadIdx.x == 0) {
                int32_t *counters = cut.counters + 2 * index;
                __threadfence();
                atomicAdd(counters, 1);
                wait_for(counters, n_parts);
                // Who leaves last leaves zeros.
                if (atomicAdd(counters + 1, 1) == n_parts - 1) {
                    counters[0] = 0;
                    counters[1] = 0;
                }
            }
            consumers_meet();
            for (int turn = wg; turn * n_parts + part < n_pieces / 2; turn += kGroups) {
                const int piece = 2 * (turn * n_parts + part);
                float sums[2][16] = {};
#pragma unroll 1
                for (int p = 0; p < n_parts; p += 4) {
                    float4 v[4][2][4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int t = 0; t < 2; ++t)
#pragma unroll
                            for (int j = 0; j < 4; ++j) v[i][t][j] = load_if(p + i < n_parts, (p + i == part ? own + (2 * turn + t) * kPieceFloats : of_tile + ((p + i) * kUnits * S::kPieces + piece + t) * kPieceFloats) + j * 512);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int t = 0; t < 2; ++t)
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                sums[t][4 * j] += v[i][t][j].x; sums[t][4 * j + 1] += v[i][t][j].y; sums[t][4 * j + 2] += v[i][t][j].z; sums[t][4 * j + 3] += v[i][t][j].w;
                            }
                }
                const int n = tile * kWidth + piece % S::kPieces * kPiece, row = (first_unit + piece / S::kPieces) * 64 + row_in_unit;
                if constexpr (kWay == kFront) {
                    struct Both {
                        const float (&v)[2][16];
                        __device__ __forceinline__ float operator[](int i) const { return v[i / 16][i % 16]; }
                    };
                    store_front<64>(a, n, row, c, end, Both{sums});
                } else {
#pragma unroll 1
                    for (int t = 0; t < 2; ++t) {
                        store_piece(a, n + t * kPiece, row, c, end, factor_of(row), factor_of(row + 8), sums[0]);
#pragma unroll
                        for (int i = 0; i < 16; ++i) sums[0][i] = sums[1][i];
                    }
                }
            }
        }
    }
#endif
}

// How a launch goes: tiles of so many columns, of at most `most` units as their kernel takes them; of so many units here, and in so many parts of K.
struct Plan {
    int width = 0, most = 0, units = 0, m_tiles = 0, n_parts = 0;
    double us = 1e30;
};

// Boxes of a tile's rows of x and of so many of every weight, and in the arguments where each weight's columns begin.
int32_t tall_maps(const Launch &l, GemmMaps *maps, GemmArguments &a, int64_t max_rows, int width, int box, int x_box) {
    const bool gated = a.act != PK_ACT_NONE;
    if (int32_t e = make_map(l, &maps->x, a.x, false, max_rows, a.k, a.x_row_bytes, x_box)) return e;
    int32_t columns = 0;
    for (int i = 0; i < 3; ++i) {
        const GemmWeight &w = a.w[i < a.n_w ? i : 0];
        if (int32_t e = make_map(l, &maps->w[i], w.data, false, w.rows, w.row_bytes / 2, w.row_bytes, box)) return e;
        if (i >= a.n_w) continue;
        a.w[i].first_tile = gated ? 0 : columns;
        if (!gated || i == 0) columns += w.rows;
    }
    if (gated) width /= 2;
    a.n_tiles = (columns + width - 1) / width;
    return PK_OK;
}

template <int kWidth, int kUnits, Way kWay>
int32_t launch_way(const Launch &l, GemmArguments a, int64_t max_rows, const Plan &plan) {
    using S = TallShape<kWidth, kUnits>;
    GemmMaps maps;
    if (int32_t e = tall_maps(l, &maps, a, max_rows, kWidth, box_rows(kWidth, kWay), plan.units * 64 / S::kXBoxes)) return e;
    const int64_t all = int64_t{plan.m_tiles} * a.n_tiles, bytes = plan.n_parts > 1 ? all * plan.n_parts * S::kPartBytes : 0;
    const TallCut cut = {reinterpret_cast<float *>(l.scratch + (l.scratch_bytes - bytes) / 256 * 256), l.counters, plan.n_parts, plan.m_tiles, plan.units};
    Launch own = l;
    own.overlap = true;
    return launch(own, "gemm_tall", gemm_tall_kernel<kWidth, kUnits, kWay>, dim3(static_cast<unsigned>(plan.n_parts > 1 ? all * plan.n_parts : std::min<int64_t>(all, l.ctx->n_processors))), dim3(kThreads), S::kBytes, maps, a, cut);
}

template <int kWidth>
int32_t launch_width(const Launch &l, const GemmArguments &a, int64_t max_rows, const Plan &plan) {
    if (a.act != PK_ACT_NONE) return a.act == PK_ACT_SILU ? launch_way<kWidth, 4, kSilu>(l, a, max_rows, plan) : launch_way<kWidth, 4, kGelu>(l, a, max_rows, plan);
    if (a.norm.out != nullptr) return launch_way<kWidth, 4, kFront>(l, a, max_rows, plan);
    return plan.n_parts == 1 ? launch_way<kWidth, 4, kWhole>(l, a, max_rows, plan) : launch_way<kWidth, 4, kCut>(l, a, max_rows, plan);
}

// What a launch takes with `rows` rows in m_tiles tiles of rows and tiles of so many columns, in us: by what steps of K take the tensor cores (at the clocks that they keep), the
// second-level cache and memory. Fitted to an 8B's products with 160 to 512 rows on an H200 (LOG.md, M35).
double estimate(const Launch &l, const GemmArguments &a, int64_t rows, int64_t width, int64_t m_tiles, int64_t parts) {
    const bool gated = a.act != PK_ACT_NONE;
    int64_t columns = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) columns += a.w[i].rows;
    const int64_t wide = gated ? width / 2 : width, blocks = m_tiles * ((columns + wide - 1) / wide) * parts, n_steps = (a.k + 63) / 64, all_units = (rows + 63) / 64, units = (all_units + m_tiles - 1) / m_tiles, n = l.ctx->n_processors;
    const int64_t full = blocks / n, rest = blocks % n;
    // Blocks that come to several tiles come to high and low ones.
    const double height = blocks > n && n % m_tiles == 0 ? static_cast<double>(all_units) / static_cast<double>(m_tiles) : static_cast<double>(units);
    auto step = [&](int64_t at_once) { return std::max({height * static_cast<double>(width) * 2 / 1450.0, static_cast<double>(at_once * (units * 64 + width) * 128) / 10.5e6, static_cast<double>(at_once * width * 128 / m_tiles) / 4.0e6}); };
    return static_cast<double>((n_steps + parts - 1) / parts) * (static_cast<double>(full) * step(n) + (rest > 0 ? step(rest) : 0.0)) + (parts > 1 ? 12.0 : 8.0) + 1.5 * static_cast<double>(full + (rest > 0) - 1);
}

// Considers tiles of so many columns and of up to kUnits units.
template <int kWidth, int kUnits>
void consider(const Launch &l, const GemmArguments &a, int64_t max_rows, Plan *best) {
    const bool gated = a.act != PK_ACT_NONE;
    int64_t columns = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) columns += a.w[i].rows;
    const int64_t wide = gated ? kWidth / 2 : kWidth, n_tiles = (columns + wide - 1) / wide, n_steps = (a.k + 63) / 64, all_units = (max_rows + 63) / 64;
    const int64_t room = l.scratch_bytes - max_rows * a.k * 2 - (1 << 20);  // x narrowed, or squares, may lie in front of the parts
    const int64_t fewest = (all_units + kUnits - 1) / kUnits, most = max_rows <= kClusterRows ? fewest : (all_units + 1) / 2;
    for (int64_t m_tiles = fewest; m_tiles <= most; ++m_tiles)
        for (int parts = kUnits > 4 ? 2 : 1; parts <= (gated ? 1 : kMostParts) && parts <= n_steps; ++parts) {
            const int64_t tiles = m_tiles * n_tiles;
            if (parts > 1 && (tiles * parts > l.ctx->n_processors || tiles * parts * TallShape<kWidth, kUnits>::kPartBytes > room)) break;
            const double us = estimate(l, a, max_rows, kWidth, m_tiles, parts);
            if (us < best->us) *best = {kWidth, kUnits, static_cast<int>((all_units + m_tiles - 1) / m_tiles), static_cast<int>(m_tiles), parts, us};
        }
}

Plan plan_of(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    Plan best;
    consider<192, 4>(l, a, max_rows, &best);
    consider<128, 4>(l, a, max_rows, &best);
    if (max_rows > kClusterRows && a.act == PK_ACT_NONE) consider<128, 5>(l, a, max_rows, &best);
    return best;
}

}  // namespace

bool is_tall(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (max_rows <= 128 || max_rows > kTallRows || a.min_rows > 0 || a.are_unpacked || a.x_scale != nullptr || a.softcap > 0.0f) return false;
    const bool gated = a.act != PK_ACT_NONE;
    // Small products lose more at a cut than tiles gain, and what is gated is not cut.
    int64_t n_weights = 0;
    for (int i = 0; i < a.n_w; ++i) n_weights += int64_t{a.w[i].rows} * a.k;
    if (n_weights < kLeastWeights || (gated && (max_rows + 255) / 256 * a.w[0].rows < 64 * l.ctx->n_processors / 2)) return false;
    if (gated && ((a.act != PK_ACT_SILU && a.act != PK_ACT_GELU_TANH) || a.n_w != 2 || a.add != nullptr || a.y_format != PK_BF16)) return false;
    if (a.add != nullptr && (a.add_format != PK_F32 || a.y_format != PK_F32)) return false;
    // 16 bytes a store.
    const int64_t apart = a.y_format == PK_BF16 ? 7 : 3;
    if ((a.y_stride & apart) || (reinterpret_cast<uintptr_t>(a.y) & 15) || (a.add != nullptr && ((a.add_stride & 3) || (reinterpret_cast<uintptr_t>(a.add) & 15)))) return false;
    for (int i = 0; i < a.n_w; ++i)
        if (a.w[i].rows % (gated ? kPiece : 64) || a.w[i].row_scale != nullptr || (a.w[i].first_column & apart) || (gated && a.w[i].bias != nullptr)) return false;
    if (max_rows <= kClusterRows) return true;
    // Else gemm_wgmma's tiles of 128 by 256, as many as a step has, where they are clearly quicker: by steps of fewer rows than they were launched for, as most are.
    const Plan plan = plan_of(l, a, max_rows);
    const int64_t rows = max_rows * 7 / 8;
    return 0.95 * estimate(l, a, rows, plan.width, plan.m_tiles, plan.n_parts) < estimate(l, a, rows, 256, (rows + 127) / 128, 1);
}

bool tall_is_cut(const Launch &l, const GemmArguments &a, int64_t max_rows) { return plan_of(l, a, max_rows).n_parts > 1; }

int32_t launch_gemm_tall(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    const Plan best = plan_of(l, a, max_rows);
    if (best.most == 5) return launch_way<128, 5, kCut>(l, a, max_rows, best);
    return best.width == 192 ? launch_width<192>(l, a, max_rows, best) : launch_width<128>(l, a, max_rows, best);
}

}  // namespace pk
