// All of a lone token's experts in one launch, one translation unit per weight format (PK_EXPERT_FORMAT).
//
// A block a multiprocessor. First gate and up: warps split K, the hidden values go through memory. While the blocks wait for each
// other, the first units of `down` are already on their way into registers: they depend on nothing but the choice. Then each block
// makes 16 rows of the output at a time, its warps taking units of all experts in turn, summed in shared memory: no launch for the sum.
#include "../../include/experts_piece.cuh"

namespace pk {
namespace {

constexpr int kAhead = 4;  // units of `down` a warp asks for before it waits

// One token's gate and up: 16 hidden values of an expert a task, `warps_k` warps each. Shared: x, sums, partial sums.
template <int kFormat>
__device__ __forceinline__ void make_hidden(const ExpertProduct &p, uint8_t *xs) {
    using P = PieceOf<kFormat>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wk = warp % p.warps_k, wm = warp / p.warps_k, warps_m = 8 / p.warps_k;
    const bool is_gated = p.n_w == 2;
    const int n_groups = (p.n_rows + 15) / 16, n_tasks = n_groups * p.n_used;
    float *sums = reinterpret_cast<float *>(xs + p.x_row_bytes), *red = sums + (P::kHasSums ? p.n_units * P::kU / P::kGroup * 8 : 0);
    typename P::Registers regs[2][2];  // unit in turn, weight
    float block_scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    auto load = [&]<int kTurn>(int task, int unit) {
        const int e = p.ids[task % p.n_used], row0 = task / p.n_used * 16;
        const int place = place_of(p, e >= 0 && e < p.n_experts ? e : 0);
#pragma unroll
        for (int t = 0; t < 2; ++t)
            if (t == 0 || is_gated) {
                const uint8_t *matrix = p.w[t].data + place * p.w[t].stride;
                const int from = min(row0, p.w[t].padded_rows - 16);
                P::load(regs[kTurn][t], p.w[t], matrix, from, unit, p.n_units, lane);
                if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) block_scale[kTurn][t] = block_scale_of(p.w[t], matrix, from, unit);
            }
    };
    // Tasks go to warps' groups of all blocks in turn, so that no block has two while another has none.
    const int n_teams = gridDim.x * warps_m, first = wm * gridDim.x + blockIdx.x;
    if (first < n_tasks && wk < p.n_units) load.template operator()<0>(first, wk);
    if (first < n_tasks && wk + p.warps_k < p.n_units) load.template operator()<1>(first, wk + p.warps_k);
    stage_x<kFormat>(p, ExpertItem{0, 0, 1, 0}, xs);
    __syncthreads();
    if constexpr (P::kHasSums) {
        stage_sums<kFormat>(p, ExpertItem{0, 0, 1, 0}, xs, sums);
        __syncthreads();
    }
    const uint8_t *x_lane = xs + (lane & 3) * 16;
    for (int round = 0; round * n_teams < n_tasks; ++round) {
        const int task = first + round * n_teams, next_task = task + n_teams;
        float acc[2][4] = {};
        const int e = task < n_tasks ? p.ids[task % p.n_used] : -1;
        const bool is_there = e >= 0 && e < p.n_experts;
        const int expert = is_there ? e : 0, row0 = task / p.n_used * 16;
        if (task < n_tasks)
            for (int u = wk; u < p.n_units; u += 2 * p.warps_k) {
                auto turn = [&]<int kTurn>(int at) {
                    if (at >= p.n_units) return;
#pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        if (t == 1 && !is_gated) continue;
                        multiply<kFormat>(regs[kTurn][t], acc[t], x_lane + at * P::kU * 2, sums + at * (P::kU / P::kGroup) * 8 + 2 * (lane & 3), block_scale[kTurn][t]);
                    }
                    if (at + 2 * p.warps_k < p.n_units) load.template operator()<kTurn>(task, at + 2 * p.warps_k);
                };
                turn.template operator()<0>(u);
                turn.template operator()<1>(u + p.warps_k);
            }
        if (next_task < n_tasks && wk < p.n_units) load.template operator()<0>(next_task, wk);
        if (next_task < n_tasks && wk + p.warps_k < p.n_units) load.template operator()<1>(next_task, wk + p.warps_k);
        __syncthreads();
        if ((lane & 3) == 0) {
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                red[warp * 32 + t * 16 + (lane >> 2)] = acc[t][0];
                red[warp * 32 + t * 16 + (lane >> 2) + 8] = acc[t][2];
            }
        }
        __syncthreads();
        if (wk != 0 || lane >= 16 || task >= n_tasks) continue;
        const int row = row0 + lane, i = task % p.n_used;
        if (row >= p.padded_out) continue;
        float v = 0.0f;
        if (row < p.n_rows && is_there) {
            const int place = place_of(p, expert);
            const uint8_t *first_matrix = p.w[0].data + place * p.w[0].stride;
            float a = 0.0f, b = 0.0f;
            for (int k = 0; k < p.warps_k; ++k) {
                a += red[(warp + k) * 32 + lane];
                b += red[(warp + k) * 32 + 16 + lane];
            }
            v = finish(p.w[0], first_matrix, *reinterpret_cast<const float *>(first_matrix + p.w[0].scale_at), expert, row, a);
            if (is_gated) {
                const uint8_t *second_matrix = p.w[1].data + place * p.w[1].stride;
                v = gated(p, v, finish(p.w[1], second_matrix, *reinterpret_cast<const float *>(second_matrix + p.w[1].scale_at), expert, row, b));
            } else {
                v = activate(v, p.act);
            }
        }
        store_from_f32(p.out, i * p.out_stride + row, p.out_format, v);
    }
}

// Grid: multiprocessors. Shared: the larger of what the two halves stage.
template <int kFormat>
__global__ void __launch_bounds__(kExpertThreads, 1) expert_lone_kernel(const __grid_constant__ ExpertProduct p, const __grid_constant__ ExpertProduct d, const __grid_constant__ LoneEnd end) {
    using P = PieceOf<kFormat>;
    extern __shared__ __align__(128) uint8_t shared[];
    wait_dependence();
    release_dependents();
    if (rows_of(p.info, p.rows_symbol) < 1) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_tiles = (d.n_rows + 15) / 16;
    // Steps of a warp: tiles of this block, and of each every eighth of the experts' units.
    const int all = d.n_used * d.n_units, per_tile = (all - warp + 7) / 8;
    const int n_own = static_cast<int>(blockIdx.x) < n_tiles ? (n_tiles - static_cast<int>(blockIdx.x) - 1) / static_cast<int>(gridDim.x) + 1 : 0, n_steps = n_own * per_tile;
    struct Ahead {
        typename P::Registers regs;
        float block_scale = 1.0f;
    } ahead[kAhead];
    auto unit_of = [&](int step) { return warp + step % per_tile * 8; };  // of all experts'
    auto row_of = [&](int step) { return (blockIdx.x + step / per_tile * gridDim.x) * 16; };
    auto expert_of = [&](int slot) {
        const int e = d.ids[slot];
        return e >= 0 && e < d.n_experts ? e : 0;
    };
    auto load = [&](Ahead &r, int step) {
        if (step >= n_steps) return;
        const int at = unit_of(step), slot = at / d.n_units, unit = at - slot * d.n_units;
        const uint8_t *matrix = d.w[0].data + place_of(d, expert_of(slot)) * d.w[0].stride;
        const int from = min(row_of(step), d.w[0].padded_rows - 16);
        P::load(r.regs, d.w[0], matrix, from, unit, d.n_units, lane);
        if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) r.block_scale = block_scale_of(d.w[0], matrix, from, unit);
    };
    make_hidden<kFormat>(p, shared);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i], i);
    meet(end.counter);
    // Hidden values of every expert, then the sums of each.
    const int sums_floats = P::kHasSums ? d.n_units * P::kU / P::kGroup * 8 : 0;
    float *all_sums = reinterpret_cast<float *>(shared + d.n_used * d.x_row_bytes);
    stage_x<kFormat>(d, ExpertItem{0, 0, d.n_used, 0}, shared);
    __syncthreads();
    if constexpr (P::kHasSums) {
        for (int i = 0; i < d.n_used; ++i) stage_sums<kFormat>(d, ExpertItem{0, i, 1, 0}, shared + i * d.x_row_bytes, all_sums + i * sums_floats);
        __syncthreads();
    }
    float(*red)[16] = reinterpret_cast<float(*)[16]>(all_sums + d.n_used * sums_floats);
    float acc[4] = {}, total[2] = {};
    auto step_of = [&](Ahead &r, int step) {
        const int at = unit_of(step), slot = at / d.n_units, unit = at - slot * d.n_units, row0 = row_of(step), expert = expert_of(slot);
        const uint8_t *matrix = d.w[0].data + place_of(d, expert) * d.w[0].stride, *x = shared + slot * d.x_row_bytes;
        multiply<kFormat>(r.regs, acc, x + (lane & 3) * 16 + unit * P::kU * 2, all_sums + slot * sums_floats + unit * (P::kU / P::kGroup) * 8 + 2 * (lane & 3), r.block_scale);
        load(r, step + kAhead);
        if (unit + 8 < d.n_units) return;  // the warp has more of this expert
        const float scale = *reinterpret_cast<const float *>(matrix + d.w[0].scale_at);
        const int id = d.ids[slot];
        const float factor = id >= 0 && id < d.n_experts ? end.weights[slot] * end.scale : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + (lane >> 2) + 8 * h;
            if (row >= d.n_rows || factor == 0.0f) continue;
            float v = finish(d.w[0], matrix, scale, expert, row, acc[2 * h]);
            // The bias counts once: where the last unit is.
            if (unit + 1 < d.n_units && d.w[0].bias != nullptr) v -= d.w[0].bias[static_cast<int64_t>(expert) * d.w[0].rows + row];
            total[h] = fmaf(factor, v, total[h]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = 0.0f;
    };
    int step = 0;
    for (int tile = 0; tile < n_own; ++tile) {
        // per_tile is no multiple of kAhead in general: registers are taken in turn by a switch that is the same for the warp.
        for (const int until = (tile + 1) * per_tile; step < until; ++step) {
            switch (step % kAhead) {
                case 0: step_of(ahead[0], step); break;
                case 1: step_of(ahead[1], step); break;
                case 2: step_of(ahead[2], step); break;
                default: step_of(ahead[3], step); break;
            }
        }
        if ((lane & 3) == 0) {
            red[warp][lane >> 2] = total[0];
            red[warp][(lane >> 2) + 8] = total[1];
        }
        total[0] = total[1] = 0.0f;
        __syncthreads();
        const int row = (blockIdx.x + tile * gridDim.x) * 16 + threadIdx.x;
        if (threadIdx.x < 16 && row < d.n_rows) {
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; ++w) v += red[w][threadIdx.x];
            if (end.add != nullptr) v += load_as_f32(end.add, row, end.add_format);
            store_from_f32(end.y, row, end.y_format, v);
        }
        __syncthreads();
    }
    leave(end.counter);
}

}  // namespace

template <int kFormat>
int32_t launch_expert_lone(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, const LoneEnd &end, int64_t shared_bytes) {
    return launch(l, "expert_lone", expert_lone_kernel<kFormat>, dim3(l.ctx->n_processors), dim3(kExpertThreads), shared_bytes, p, d, end);
}

template int32_t launch_expert_lone<PK_EXPERT_FORMAT>(const Launch &, const ExpertProduct &, const ExpertProduct &, const LoneEnd &, int64_t);

}  // namespace pk
