// A lone token's mixture in one launch: norm, router, choice, gate and up, down and the sum, with the shared expert beside the chosen ones;
// in front of it the product that ends the branch before.
//
// A block a multiprocessor; the blocks meet after that product and twice more. First the router's rows and the shared expert's gate and up (every block norms the residual for itself);
// then a warp of each block makes the choice from the logits and the blocks share gate and up of the chosen; then 16 rows of the output
// each, all experts as one long row of K, whose first units are on their way before the meeting. What all need at one place (logits, scales
// of matrices) is read by one warp of a block: two thousand requests for a line come one after the other.
#include <algorithm>
#include <type_traits>

#include "../../include/lone_row.cuh"
#include "../../include/mixture.cuh"

namespace pk {
namespace {

// Blocks meet at a counter of their own, zero between launches: each tells it that it has come and that it has gone, and the last one finds it back at zero. (A release
// waits for what its warp has asked for: weights are asked for after it.)
__device__ __forceinline__ void tell(int32_t *counter) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(2 * gridDim.x - 1) : "memory");
}
__device__ __forceinline__ void await_all(int32_t *counter) {
    if (threadIdx.x == 0) {
        uint32_t seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < gridDim.x);
        asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(2 * gridDim.x - 1) : "memory");
    }
    __syncthreads();
}

__device__ __forceinline__ float gated_by(const MixtureArguments &a, float gate, float up) {
    if (a.act != PK_ACT_SWIGLU_CLAMP) return activate(gate, a.act) * up;
    gate = fminf(gate, a.limit);
    up = fminf(fmaxf(up, -a.limit), a.limit);
    return gate / (1.0f + __expf(-a.alpha * gate)) * (up + 1.0f);
}

// Grid: multiprocessors. Shared: x in both orders, before and after that other rows; partial sums.
template <int kFormat, int kPerLane>
__global__ void __launch_bounds__(kLoneThreads, 1) mixture_kernel(const __grid_constant__ MixtureArguments a) {
    constexpr int kU = Rows<kFormat>::kU, kBf16U = Rows<PK_BF16>::kU, kXBytes = kBlockWarps * kU * 2;  // of x from one unit of a warp to its next
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ float red[kBlockWarps][32], sums[2 * kBlockWarps], factors[33];  // factors: of the chosen and, last, the shared expert's output
    __shared__ int chosen_of[32], rows_here;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3;
    WarpRing ring(dynamic);
    uint8_t *shared = dynamic + kRingBytes, *x_plain = shared, *x_own = kFormat == PK_BF16 ? x_plain : shared + 2 * a.m;
    const int n_units = a.m / kU, n_shared_units = a.f_shared / kU, n_tiles = (a.m + 15) / 16;
    int32_t *const after_before = a.counter, *const after_router = a.counter + 32, *const after_hidden = a.counter + 64;
    // Sums of a warp's 16 rows (column 0 of the product, all columns are the same) to red[warp][16 side ...].
    auto put = [&](const float (&acc)[2], int side) {
        if (c == 0) {
            red[warp][16 * side + r] = acc[0];
            red[warp][16 * side + r + 8] = acc[1];
        }
    };
    auto units_of = [&](int k, int unit) { return (k / unit - warp + kBlockWarps - 1) / kBlockWarps; };  // of this warp
    auto sum_of = [&](int at) {
        float v = 0.0f;
#pragma unroll
        for (int k = 0; k < kBlockWarps; ++k) v += red[k][at];
        return v;
    };

    // The product before: 16 rows each. Its first weights are on their way while the kernel before this one ends.
    const bool has_before = a.before.data != nullptr;
    const int n_before = has_before ? units_of(a.before_k, kU) : 0;
    float x_scale = 1.0f;  // of what is staged
    int n_rows = 0;
    // Read once a block: what every warp asks for at the same place comes to it one request after the other.
    auto read_rows = [&] {
        wait_dependence();
        release_dependents();
        if (tid == 0) rows_here = rows_of(a.info, a.rows_symbol);
    };
    if (has_before) {
        const float scale = tid < 16 ? matrix_scale(a.before, 0) * a.before_scale : 0.0f;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < n_tiles || n_rows == 0; tile += gridDim.x) {
            const int row = tile * 16 + tid, mine = tile < n_tiles ? n_before : 0;
            const Rows16 rows(a.before, a.before.data, tile * 16);
            auto ask = [&](int step) { ring.ask(step < mine, rows, step * kBlockWarps + warp); };
            prime(ask);
            if (n_rows == 0) {
                read_rows();
                RowPart x;
                x.load(a.before_x, a.before_k);
                x_scale = x.template stage<kFormat>(shared, a.before_k, sums);
                n_rows = rows_here;
                if (n_rows < 1) return;
                if (!mine) break;
            }
            const float old = tid < 16 && row < a.m ? __ldcg(a.residual + row) : 0.0f;
            float acc[2] = {};
            const uint8_t *at = shared + c * 16 + warp * kU * 2;
            stream_steps(ring, mine, ask, [&](const RowsRegisters &unit, float factor, int) {
                multiply_row<kFormat>(unit, acc, at, factor);
                at += kXBytes;
            });
            put(acc, 0);
            __syncthreads();
            if (tid < 16 && row < a.m) a.residual[row] = fmaf(sum_of(tid), scale * x_scale, old);
            if (tile + static_cast<int>(gridDim.x) < n_tiles) __syncthreads();
        }
        __syncwarp();
        if (tid == 0) tell(after_before);
    } else {
        read_rows();
        __syncthreads();
        if (rows_here < 1) return;
    }

    // First: router, the shared expert's gate and up, and its own gate. A task is a block's: its warps take turns at the units.
    const int router_tiles = (a.n_experts + 15) / 16, shared_tiles = (a.f_shared + 15) / 16, n_first = router_tiles + shared_tiles + (a.switching.data != nullptr);
    bool is_normed = false;
#pragma unroll 1
    for (int task = blockIdx.x; task < n_first || !is_normed; task += gridDim.x) {
        const bool is_here = task < n_first, is_router = task < router_tiles, is_both = is_here && !is_router && task < router_tiles + shared_tiles;
        const ExpertWeight &w0 = is_both ? a.shared_gate : is_router ? a.router : a.switching;
        const int row0 = (is_router ? task : is_both ? task - router_tiles : 0) * 16, each = units_of(a.m, is_both ? kU : kBf16U), n = is_here ? (is_both ? 2 : 1) * each : 0;
        const Rows16 first(w0, w0.data, row0), second(a.shared_up, a.shared_up.data, row0);
        auto ask = [&](int step) {
            const bool side = is_both && step >= each;
            ring.ask(step < n, Rows16(!side, first, second), (side ? step - each : step) * kBlockWarps + warp);
        };
        prime(ask);
        const float scale0 = is_here && tid < 16 ? matrix_scale(w0, 0) : 0.0f, scale1 = is_both && tid < 16 ? matrix_scale(a.shared_up, 0) : 1.0f;
        const float bias = is_here && is_router && a.router_bias != nullptr && tid < 16 && row0 + tid < a.n_experts ? __ldg(a.router_bias + row0 + tid) : 0.0f;
        if (!is_normed) {
            NormedPart x;
            x.load_weight(a.norm, a.m);
            if (has_before) await_all(after_before);
            x.load(a.residual, a.m);
            x_scale = x.template stage<kFormat>(a.eps, a.m, x_plain, x_own, a.normed, sums);
            is_normed = true;
        }
        if (!is_here) break;
        float acc[2] = {}, gate[2] = {};
        if (is_both) {
            stream_steps(ring, n, ask, [&](const RowsRegisters &unit, float factor, int step) {
                multiply_row<kFormat>(unit, acc, x_own + c * 16 + ((step >= each ? step - each : step) * kBlockWarps + warp) * kU * 2, factor);
                if (step != each - 1) return;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    gate[i] = acc[i];
                    acc[i] = 0.0f;
                }
            });
        } else {
            stream_steps(ring, n, ask, [&](const RowsRegisters &unit, float factor, int step) { multiply_row<PK_BF16>(unit, gate, x_plain + c * 16 + (step * kBlockWarps + warp) * kBf16U * 2, factor); });
        }
        put(gate, 0);
        put(acc, 1);
        __syncthreads();
        if (tid < 16) {
            const float v = sum_of(tid) * scale0 * (is_both ? x_scale : 1.0f), u = sum_of(16 + tid) * scale1 * x_scale;
            const int row = row0 + tid;
            if (is_both) {
                if (row < a.f_shared) a.hidden[a.n_used * a.f + row] = __float2bfloat16(gated_by(a, v, u));
            } else if (is_router) {
                if (row < a.n_experts) a.logits[row] = (v + bias) * a.router_scale;
            } else if (row == 0) {
                *a.switched = v * a.switch_scale;
            }
        }
        if (task + static_cast<int>(gridDim.x) < n_first) __syncthreads();
    }
    __syncwarp();
    if (tid == 0) tell(after_router);

    // Gate and up: 16 hidden values of an expert a task, warps_k warps each.
    const int wk = warp % a.warps_k, team = warp / a.warps_k, tiles = (a.f + 15) / 16, n_tasks = tiles * a.n_used, first_task = team * gridDim.x + blockIdx.x, all_teams = gridDim.x * (kBlockWarps / a.warps_k);
    const int each = n_units / a.warps_k, n_own = first_task < n_tasks ? (n_tasks - first_task - 1) / all_teams + 1 : 0, tile_step = all_teams / a.n_used, slot_step = all_teams % a.n_used;
    // Where a warp is: one that loads and, behind it, one that multiplies.
    struct Task {
        int tile, slot, tile_step, slot_step, n_used;
        __device__ void advance() {
            tile += tile_step;
            slot += slot_step;
            if (slot >= n_used) {
                slot -= n_used;
                ++tile;
            }
        }
    };
    const Task first = {first_task / a.n_used, first_task % a.n_used, tile_step, slot_step, a.n_used};
    await_all(after_router);

    // The choice, by one warp: logits, and later scales, are read once a block.
    Choice<kPerLane> choice;
    float switch_logit = 0.0f;
    if (warp == 0) {
        if (a.switching.data != nullptr) switch_logit = __ldcg(a.switched);
        choice.load(a.choice);
        chosen_of[lane] = choice.choose(a.choice);
    }
    __syncthreads();
    const int chosen = chosen_of[lane];
    {
        Task loading = first, multiplying = first;
        Rows16 rows = {};
        int asked = 0, side = 0, own = 0;
        auto ask = [&](int) {
            if (asked == 0 && own < n_own) {
                const ExpertWeight &w = side ? a.up : a.gate;
                rows = Rows16(w, w.data + __shfl_sync(~0u, chosen, loading.slot) * w.stride, loading.tile * 16);
            }
            ring.ask(own < n_own, rows, asked * a.warps_k + wk);
            if (++asked < each) return;
            asked = 0;
            side ^= 1;
            if (side) return;
            ++own;
            loading.advance();
        };
        prime(ask);
        float gate_scale = 0.0f, up_scale = 0.0f;
        if (wk == 0 && lane < a.n_used) {
            gate_scale = matrix_scale(a.gate, chosen);
            up_scale = matrix_scale(a.up, chosen);
        }
        if (warp == 0) {
            const float down_scale = lane < a.n_used ? matrix_scale(a.down, chosen) : 0.0f, shared_scale = a.f_shared ? matrix_scale(a.shared_down, 0) : 0.0f;
            const float weight = choice.weigh(a.choice, chosen);
            factors[lane] = down_scale * weight * a.experts_scale;
            if (lane == 0) factors[32] = shared_scale * a.shared_scale * (a.switching.data != nullptr ? 1.0f / (1.0f + __expf(-switch_logit)) : 1.0f);
            if (blockIdx.x == 0 && lane < a.n_used) {
                a.ids[lane] = chosen;
                a.weights[lane] = weight;
            }
        }
        float acc[2] = {}, gate[2] = {};
        int in = 0;
        stream_steps(ring, n_own * 2 * each, ask, [&](const RowsRegisters &unit, float factor, int) {
            multiply_row<kFormat>(unit, acc, x_own + c * 16 + ((in >= each ? in - each : in) * a.warps_k + wk) * kU * 2, factor);
            ++in;
            if (in == each) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    gate[i] = acc[i];
                    acc[i] = 0.0f;
                }
            }
            if (in < 2 * each) return;
            in = 0;
            auto team_sync = [&] {
                if (a.warps_k > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * a.warps_k) : "memory");
                else __syncwarp();
            };
            team_sync();
            put(gate, 0);
            put(acc, 1);
            team_sync();
            const int row = multiplying.tile * 16 + lane;
            const float gs = __shfl_sync(~0u, gate_scale, multiplying.slot), us = __shfl_sync(~0u, up_scale, multiplying.slot);
            if (wk == 0 && lane < 16 && row < a.f) {
                float v = 0.0f, u = 0.0f;
#pragma unroll 1
                for (int k = 0; k < a.warps_k; ++k) {
                    v += red[warp + k][lane];
                    u += red[warp + k][16 + lane];
                }
                a.hidden[multiplying.slot * a.f + row] = __float2bfloat16(gated_by(a, v * gs * x_scale, u * us * x_scale));
            }
            __syncwarp();
            multiplying.advance();
#pragma unroll
            for (int i = 0; i < 2; ++i) acc[i] = 0.0f;
        });
    }

    // Down: all experts one after the other, the shared one last.
    const int own_units = a.f / kU, all_units = a.n_used * own_units + n_shared_units, n = (all_units - warp + kBlockWarps - 1) / kBlockWarps, n_hidden = a.n_used * a.f + a.f_shared;
    bool has_met = false;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < n_tiles || !has_met; tile += gridDim.x) {
        const int mine = tile < n_tiles ? n : 0, row = tile * 16 + tid;
        struct Place {
            int slot, unit, own_units, n_used;
            __device__ void settle() {
                while (unit >= own_units && slot < n_used) {
                    unit -= own_units;
                    ++slot;
                }
            }
        } loading = {0, warp, own_units, a.n_used}, multiplying = loading;
        auto ask = [&](int step) {
            loading.settle();
            const bool is_own = loading.slot < a.n_used;
            const int expert = __shfl_sync(~0u, chosen, is_own ? loading.slot : 0);
            const ExpertWeight &w = is_own ? a.down : a.shared_down;
            ring.ask(step < mine, Rows16(w, w.data + (is_own ? expert * w.stride : 0), tile * 16), loading.unit);
            loading.unit += kBlockWarps;
        };
        if (!has_met) {
            __syncthreads();
            if (tid == 0) tell(after_hidden);
        }
        prime(ask);
        const float old = tid < 16 && row < a.m && mine ? __ldcg(a.residual + row) : 0.0f;
        if (!has_met) {
            await_all(after_hidden);
            has_met = true;
            RowPart x;
            x.load(a.hidden, n_hidden);
            x_scale = x.template stage<kFormat>(shared, n_hidden, sums);
        }
        float acc[2] = {};
        const uint8_t *at = shared + c * 16 + warp * kU * 2;
        stream_steps(ring, mine, ask, [&](const RowsRegisters &unit, float factor, int) {
            multiplying.settle();
            const bool is_own = multiplying.slot < a.n_used;
            multiply_row<kFormat>(unit, acc, at, factor * factors[is_own ? multiplying.slot : 32]);
            multiplying.unit += kBlockWarps;
            at += kXBytes;
        });
        put(acc, 0);
        __syncthreads();
        if (tid < 16 && row < a.m && mine) a.residual[row] = fmaf(sum_of(tid), x_scale, old);
        if (tile + static_cast<int>(gridDim.x) < n_tiles) __syncthreads();
    }
}

}  // namespace

int64_t mixture_shared_bytes(const MixtureArguments &a) { return kRingBytes + 2 * std::max({int64_t{2} * a.m, int64_t{a.n_used} * a.f + a.f_shared, int64_t{a.before_k}}); }

int32_t launch_mixture(const Launch &l, const Mixture &mixture) {
    MixtureArguments a = mixture.arguments;
    a.info = l.info;
    a.counter = l.counters;
    a.hidden = reinterpret_cast<bf16 *>(l.scratch);
    a.switched = reinterpret_cast<float *>(l.scratch + ((int64_t{a.n_used} * a.f + a.f_shared) * 2 + 255) / 256 * 256);
    const dim3 blocks(l.ctx->n_processors), threads(kLoneThreads);
    Launch own = l;
    own.overlap = kOverlaps;  // weights are asked for while the kernel before ends
    auto run = [&](auto kernel) { return launch(own, "mixture", kernel, blocks, threads, mixture_shared_bytes(a), a); };
    constexpr int kFew = kMostPerLane / 2;
    if (a.n_experts <= 32 * kFew) return mixture.format == PK_BF16 ? run(mixture_kernel<PK_BF16, kFew>) : run(mixture_kernel<PK_FP8_E4M3, kFew>);
    return mixture.format == PK_BF16 ? run(mixture_kernel<PK_BF16, kMostPerLane>) : run(mixture_kernel<PK_FP8_E4M3, kMostPerLane>);
}

}  // namespace pk
