// Tall matmul on Hopper: y[rows, N] = x[rows, K] W^T for 129 to 1,536 rows in BF16, 129 to 256 in FP8, with tiles that fill the device in as few waves as can be.
//
// A tile is up to 256 rows of x by 192 or 128 of W, or 320 by 128, in units of 64 rows that two consumer warpgroups take by turns; one thread asks for
// boxes. A step's units are dealt out among tiles alike, so that no more is multiplied than there is. Few tiles are cut along K among blocks: these lay
// their sums into L2, in pieces of 64 rows by 32 columns, and every block adds and stores a share of the pieces, in one order. Blocks wait for
// each other, so that a cut launch never has more blocks than processors. Weights of the first stages are asked for before the kernels ahead
// are done. With an activation the first half of a tile is gate, the second up.
//
// FP8 (tall_fp8.cuh): a stage is 128 of K, and one warpgroup adds its sums while the other multiplies. Tiles are 128 wide; gated ones 128 x 256, so that a row's 128 columns of y are one
// block's, which may leave them narrowed. Gated tiles that would be a last wave for half of the device are cut in two: each half keeps its sums of one unit of rows, and ends that.
//
// Assumes swizzled 128-byte boxes (K padded to whole boxes). Does not handle: what is_tall refuses.
#pragma once
#include <type_traits>

#include "once.cuh"
#include "ring_turn.cuh"
#include "tall_fp8.cuh"
#include "wgmma_n192.cuh"

namespace pk {

constexpr int kTallThreads = kTallConsumers + 128;

// What lies behind the ring.
struct TallBeside {
    alignas(16) float factors[kClusterRows];  // of rows of x, by what a norm left
    uint64_t full[kTallStages], empty[kTallStages], are_factored;
    volatile int32_t true_rows;
};

// kUnits: of a tile at most. A box of x has 256 rows at most.
template <bool kIsFp8, int kWidth, int kUnits>
struct TallShape {
    static_assert(!kIsFp8 || (kWidth == 128 && kUnits == 4) || (kWidth == 256 && kUnits == 2));  // of FP8 128 are multiplied at a time, twice a stage: sums of a stage take the registers of half as many others
    static constexpr int kBoxK = kIsFp8 ? 128 : 64, kTileRows = 64 * kUnits, kOfGroup = (kUnits + 1) / 2, kXBoxes = (kUnits + 3) / 4, kPieces = kWidth / kPiece;
    static constexpr int kStageBytes = (kTileRows + kWidth) * 128, kScaleBytes = kIsFp8 ? kTileRows * 4 : 0, kBytes = kTallStages * (kStageBytes + kScaleBytes) + sizeof(TallBeside);
    static constexpr int64_t kPartBytes = int64_t{kTileRows} * kWidth * 4;  // of one part of a tile
};

// How rows are cut into tiles, and of how many units one is at most; and tiles along K: parts, where their sums lie, and a counter a tile, zero between launches. Of FP8's gated tiles n_whole are not, and the others in two.
struct TallCut {
    float *parts;
    int32_t *counters;
    int32_t n_parts, n_whole, m_tiles, units;
};

enum Way { kSilu, kGelu, kWhole, kCut, kFront };  // kFront: cut, and in front of a norm

// Rows of W in a box: FP8's tiles lie within a weight, as all of these have whole blocks of 128 rows.
constexpr int box_rows(bool is_fp8, int width, Way way) { return is_fp8 ? 128 : way == kSilu || way == kGelu ? width / 2 : 64; }

template <bool kIsFp8, int kWidth, int kUnits, Way kWay>
__global__ void __launch_bounds__(kTallThreads, 1) gemm_tall_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a, const __grid_constant__ TallCut cut) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = TallShape<kIsFp8, kWidth, kUnits>;
    extern __shared__ __align__(1024) uint8_t ring[];
    float *scale_ring = reinterpret_cast<float *>(ring + kTallStages * S::kStageBytes);
    TallBeside &beside = *reinterpret_cast<TallBeside *>(ring + kTallStages * (S::kStageBytes + S::kScaleBytes));
    uint64_t(&full)[kTallStages] = beside.full, (&empty)[kTallStages] = beside.empty;
    constexpr int kBox = box_rows(kIsFp8, kWidth, kWay), kTileRows = S::kTileRows;
    constexpr bool gated = kWay == kSilu || kWay == kGelu, is_cut = kWay == kCut || kWay == kFront;
    static_assert(!kIsFp8 || gated == (kWidth == 256));
    static_assert(!gated || kUnits <= 4);
    const int n_parts = is_cut ? cut.n_parts : 1, first = blockIdx.x / n_parts, part = blockIdx.x - first * n_parts, stride = gridDim.x / n_parts;
    const int n_steps = (a.k + S::kBoxK - 1) / S::kBoxK, k0 = n_steps * part / n_parts, last_k = n_steps * (part + 1) / n_parts;
    const int m_tiles = cut.m_tiles, n_all = m_tiles * a.n_tiles;
    if (threadIdx.x == 0) {
        barrier_init(&beside.are_factored, kFactorWarps);
        init_ring(full, empty, kTallGroups);
    }
    __syncthreads();
    release_dependents();
    // The first unit of a tile of rows, of a step that has so many rows; FP8's are dealt by the launch's bound.
    auto unit_of = [&](int m, int n_rows) { return ((kIsFp8 ? a.most_rows : n_rows) + 63) / 64 * m / m_tiles; };
    // The tile of rows of number `index`: of another height every time that a block comes to one.
    const bool turns = stride % m_tiles == 0;
    auto row_tile = [&](int index) { return (index + (turns ? index / stride : 0)) % m_tiles; };
    // What a block does as number `index`: a tile, or behind the whole ones half of a tile's K, where who had few rows of x has many.
    constexpr bool kHalves = kIsFp8 && gated;
    const int n_items = kHalves ? 2 * n_all - cut.n_whole : n_all;
    auto is_half = [&](int index) { return kHalves && index >= cut.n_whole; };
    auto half_of = [&](int index) { return (index - cut.n_whole) / 2 % 2; };
    auto tile_of = [&](int index) { return is_half(index) ? cut.n_whole + (index - cut.n_whole) / 4 * 2 + (index - cut.n_whole) % 2 : index; };
    auto first_step = [&](int index) { return is_half(index) ? n_steps / 2 * half_of(index) : k0; };
    auto last_step = [&](int index) { return is_half(index) && half_of(index) == 0 ? n_steps / 2 : last_k; };
    RingTurn<kTallStages> in_ring;
    if (threadIdx.x >= kTallConsumers) {
        fewer_registers<40>();
        const int warp = (threadIdx.x - kTallConsumers) >> 5;
        if (warp > 0 && a.norm.row_squares != nullptr) {
            wait_dependence();
            tall_factors(a.norm, warp - 1, threadIdx.x & 31, beside.factors);
            if ((threadIdx.x & 31) == 0) barrier_arrive(&beside.are_factored);
        }
        if (threadIdx.x > kTallConsumers) return;
        const uint64_t policy = m_tiles == 1 ? kReadOnce : kReadOften;
        auto copy_weights = [&](int tile, int k, int stage) {
            barrier_more(full + stage, kWidth * 128);
            const uint32_t to = shared_address(ring + stage * S::kStageBytes + kTileRows * 128);
#pragma unroll
            for (int b = 0; b < kWidth / kBox; ++b) {
                const int n = tile * (gated ? kWidth / 2 : kWidth) + (gated ? 0 : b * kBox), i = gated ? b : weight_of(a, n);
                copy_box_once(to + b * kBox * 128, maps.w + i, k * S::kBoxK, n - a.w[i].first_tile, full + stage, policy);
            }
        };
        int n_ahead = 0;
        if (first < n_all) {
            n_ahead = min(kTallStages, last_k - k0);
            for (int i = 0; i < n_ahead; ++i) copy_weights(first / m_tiles, k0 + i, i);
            prefetch_map(&maps.x);
        }
        wait_dependence();
        const int n_rows = rows_of(a.info, a.rows_symbol), x_rows = cut.units * 64, box = x_rows / S::kXBoxes;
        for (int index = first; index < n_items; index += stride) {
            const int number = tile_of(index), tile = number / m_tiles, m = row_tile(number), row = m == 0 ? 0 : unit_of(m, n_rows) * 64, end_k = last_step(index);
#pragma unroll 1
            for (int k = first_step(index); k < end_k; ++k) {
                if (--n_ahead < 0) {
                    barrier_wait(empty + in_ring.stage, in_ring.phase ^ 1);
                    copy_weights(tile, k, in_ring.stage);
                }
                barrier_expect(full + in_ring.stage, x_rows * (kIsFp8 ? 132 : 128));
                if constexpr (kIsFp8) copy_bytes(shared_address(scale_ring + in_ring.stage * kTileRows), a.x_scale + k * a.x_scale_stride + row, x_rows * 4, full + in_ring.stage);
#pragma unroll
                for (int b = 0; b < S::kXBoxes; ++b) copy_box(ring + in_ring.stage * S::kStageBytes + b * box * 128, &maps.x, k * S::kBoxK, row + b * box, full + in_ring.stage);
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
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kTileRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * 64 * 128);
    BlockScales<kHalves ? 2 : 1> w_scales;  // of FP8; the first tile's are asked for before the kernels ahead are done
    if constexpr (kIsFp8) w_scales.ask(a, first / m_tiles, k0, n_steps);
    wait_dependence();
    if (threadIdx.x == 0) beside.true_rows = rows_of(a.info, a.rows_symbol);
    consumers_meet();
    const int n_rows = beside.true_rows;
    // What a block does as number `index`: columns, and units of rows that there are (at least one, whose sums nobody wants), of which the last row ends.
    struct Place {
        int tile, first_unit, n_true, n_units, end;
    };
    auto place_of = [&](int index) {
        const int number = tile_of(index), m = row_tile(number), first_unit = unit_of(m, n_rows), n_true = min(unit_of(m + 1, n_rows), (n_rows + 63) / 64) - first_unit;
        return Place{number / m_tiles, first_unit, n_true, max(1, n_true), min(n_rows, (first_unit + n_true) * 64)};
    };
    // What sums of a row are multiplied by.
    auto factor_of = [&](int row) { return a.norm.row_squares != nullptr ? beside.factors[row] : 1.0f; };
#pragma unroll 1
    for (int index = first; index < n_items; index += stride) {
        const Place at = place_of(index);
        const int begin_k = first_step(index), end_k = last_step(index), n_units = at.n_units, row_in_unit = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
        // Sums of units wg, wg + 2 and so on; of FP8's gated tiles those of gate and of up.
        constexpr int kSums = kHalves ? kWidth / 4 : kWidth / 2, kSets = kHalves ? 2 : S::kOfGroup;
        float acc[kSets][kSums];
#pragma unroll
        for (int u = 0; u < kSets; ++u)
#pragma unroll
            for (int i = 0; i < kSums; ++i) acc[u][i] = 0.0f;
        // Products of so many sets of sums.
        auto multiply = [&](auto n) {
            if constexpr (kIsFp8) {
                multiply_fp8<S, kHalves, decltype(n)::value>(a, at.tile, in_ring, full, begin_k, end_k, n_steps, x_first, w_first, scale_ring + wg * 64 + row_in_unit, w_scales, acc, release);
            } else {
                int previous = -1;
#pragma unroll 1
                for (int k = begin_k; k < end_k; ++k) {
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
            }
        };
        const int n_own = kHalves ? wg < n_units : (n_units - wg + 1) / kTallGroups;
        if (kSets > 2 && n_own > 2) {
            multiply(std::integral_constant<int, kSets>());
        } else if (n_own > (kHalves ? 0 : 1)) {
            multiply(std::integral_constant<int, 2>());
        } else if (!kHalves && n_own > 0) {
            multiply(std::integral_constant<int, kHalves ? 2 : 1>());
        } else {
#pragma unroll 1
            for (int k = begin_k; k < end_k; ++k) {
                barrier_wait(full + in_ring.stage, in_ring.phase);
                release(in_ring.stage);
                in_ring.advance();
            }
        }
        // Gated tiles of FP8 find it anew: registers are for sums.
        const Place then = kHalves ? place_of(fresh(index)) : at;
        const int c = lane & 3;
        if constexpr (kIsFp8 && !is_cut) {
            const int next = min(index + stride, n_items - 1);
            w_scales.ask(a, tile_of(next) / m_tiles, first_step(next), n_steps);
        }
        if (a.norm.row_squares != nullptr) barrier_wait(&beside.are_factored, 0);
        // Pairs of pieces side by side are for one part after the other to add; of FP8, whose 128 columns of a row are narrowed together, all of a unit.
        constexpr int kTogether = kIsFp8 ? S::kPieces / 2 : 1;
        const int n_pieces = max(0, then.n_true) * S::kPieces, mine = (threadIdx.x & 127) * 4;
        float *own = reinterpret_cast<float *>(ring) + mine, *of_tile = cut.parts + static_cast<int64_t>(index) * n_parts * kUnits * S::kPieces * kPieceFloats + mine;
        if constexpr (is_cut) consumers_meet();
        if constexpr (kHalves) {
            if (is_half(index)) {
                // Half number u of K ends unit u: it keeps its sums of that and lays those of the other.
                const int late = tile_of(index) - cut.n_whole, half = half_of(index);
                float *laid = cut.parts + (late * kUnits + wg) * (64 * kWidth) + mine;
                if (wg < then.n_units && wg != half) lay_sums(laid, acc);
                consumers_meet();
                if (threadIdx.x == 0) {
                    count_in(cut.counters + late, 2);
                    await_all(cut.counters + late, 2);
                }
                consumers_meet();
                if (threadIdx.x == 0) count_out(cut.counters + late, 2);
                if (wg != half) continue;
                if (wg < then.n_units) add_laid(laid, acc);
            }
        }
        // A unit is stored, or laid where whoever adds it up finds it. `from`: its set of sums.
        auto leave = [&](int unit, auto from) {
            const float(&sums_of)[kSums] = acc[decltype(from)::value];
            const int row = (then.first_unit + unit) * 64 + row_in_unit;
            if constexpr (gated) {
                struct Sums {
                    const float (&v)[2][kSums];
                    __device__ __forceinline__ float operator[](int i) const { return v[i / kSums][i % kSums]; }
                };
                store_gated<kWidth, kWay == kSilu ? PK_ACT_SILU : PK_ACT_GELU_TANH>(a, then.tile * (kWidth / 2), row, c, then.end, factor_of(row), factor_of(row + 8), Sums{acc});
            } else if constexpr (kWay == kWhole) {
#pragma unroll
                for (int g = 0; g < S::kPieces; ++g) {
                    float sums[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) sums[i] = sums_of[16 * g + i];
                    store_piece(a, then.tile * kWidth + g * kPiece, row, c, then.end, factor_of(row), factor_of(row + 8), sums);
                }
            } else {
                // A part's own lie in the ring, which everybody is through with.
                int piece = unit * S::kPieces, turn = piece / 2 / kTogether / n_parts, owner = piece / 2 / kTogether - turn * n_parts;
                turn *= kTogether;
#pragma unroll
                for (int g = 0; g < S::kPieces; ++g) {
                    float *to = owner == part ? own + (2 * turn + g % 2) * kPieceFloats : of_tile + (part * kUnits * S::kPieces + piece) * kPieceFloats;
#pragma unroll
                    for (int j = 0; j < 4; ++j) store_if(piece < n_pieces, to + j * 512, sums_of[16 * g + 4 * j], sums_of[16 * g + 4 * j + 1], sums_of[16 * g + 4 * j + 2], sums_of[16 * g + 4 * j + 3]);
                    ++piece;
                    if (g % 2 && (kTogether > 1 || ++owner == n_parts)) {
                        if (kTogether == 1) owner = 0;
                        ++turn;
                    }
                }
            }
        };
        if constexpr (kSets > 2) {
            if (n_own > 0) leave(wg, std::integral_constant<int, 0>());
            if (n_own > 1) leave(wg + 2, std::integral_constant<int, 1>());
            if (n_own > 2) leave(wg + 4, std::integral_constant<int, kSets - 1>());
        } else {
            // One copy of the code for both.
#pragma unroll 1
            for (int unit = wg; unit < then.n_units; unit += 2) {
                leave(unit, std::integral_constant<int, 0>());
#pragma unroll
                for (int i = 0; i < kSums; ++i) acc[0][i] = acc[kSets - 1][i];
            }
        }
        if constexpr (is_cut) {
            consumers_meet();
            if (threadIdx.x == 0) {
                count_in(cut.counters + index, n_parts);
                await_all(cut.counters + index, n_parts);
            }
            consumers_meet();
            if (threadIdx.x == 0) count_out(cut.counters + index, n_parts);
            auto pair_of = [&](int turn) { return (turn / kTogether * n_parts + part) * kTogether + turn % kTogether; };
            for (int turn = wg; pair_of(turn) < n_pieces / 2; turn += kTallGroups) {
                const int piece = 2 * pair_of(turn);
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
                const int n = then.tile * kWidth + piece % S::kPieces * kPiece, row = (then.first_unit + piece / S::kPieces) * 64 + row_in_unit;
                if constexpr (kWay == kFront) {
                    struct Both {
                        const float (&v)[2][16];
                        __device__ __forceinline__ float operator[](int i) const { return v[i / 16][i % 16]; }
                    };
                    if constexpr (kIsFp8) store_front_narrowed(a, n, row, c, then.end, beside.factors + row - then.first_unit * 64, wg, Both{sums});
                    else store_front<64>(a, n, row, c, then.end, Both{sums});
                } else {
#pragma unroll 1
                    for (int t = 0; t < 2; ++t) {
                        store_piece(a, n + t * kPiece, row, c, then.end, factor_of(row), factor_of(row + 8), sums[0]);
#pragma unroll
                        for (int i = 0; i < 16; ++i) sums[0][i] = sums[1][i];
                    }
                }
            }
        }
    }
#endif
}

}  // namespace pk
