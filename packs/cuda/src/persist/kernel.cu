// The persistent decode kernel: all layers of a step of one row in one launch.
//
// One block a multiprocessor. Four warps of each block stream this block's share of every weight of every phase, and of the
// row's keys and values, into rings in shared memory (one ring a multiplying warp), in order and without regard to what blocks
// wait for: they depend on nothing, so the memory stays busy meanwhile. Eight warps take chunks of 16 rows x 128 or 256 elements
// of K in turn, add them up per tile of 16 rows, join in shared memory and write. Where K allows it, a warp multiplies the part of
// x that it staged itself, so that the join is a phase's only meeting. Blocks hand activations on as packets (phase.h): there is
// no barrier of the grid. A buffer of packets is written again four phases later at the earliest: every phase reads what the
// one before it wrote, so nobody can be that far ahead of a reader. Weights: BF16, FP8 E4M3 (128 x 128 scales), Q8_0, Q4_K, Q6_K.
// No local memory: what 256 threads spill does not fit the L1 that the rings leave, and each reload waits behind the weights.
// Assumes that all blocks are resident: launched cooperatively.
#include "../../include/persist/phase.h"
#ifdef PK_WGMMA
#include "../../include/persist/attend.cuh"
#include "../../include/persist/multiply.cuh"
#include "../../include/persist/stage.cuh"

namespace pk::persist {
namespace {

constexpr int kMaxSlots = 8;

struct Shared {
    uint64_t full[kWarps][kMaxSlots], empty[kWarps][kMaxSlots];
    float squares[2][kWarps];
    RowFacts row;
    int gather;
    int n_tokens, n_samples;
    uint32_t base;
};

struct Range {
    int begin, end;
};
// The tiles of this block: the first `more` blocks of a phase have one more than the others.
__device__ __forceinline__ Range range_of(const Phase &p) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n, each = p.each, more = p.more;
    const int begin = b * each + min(b, more);
    return {begin, begin + each + (b < more)};
}
// The tiles of weight i that belong to this block, counted within the weight.
__device__ __forceinline__ Range tiles_of(const Range &all, const Weight &w) {
    const int first = w.first_tile;
    return {max(all.begin, first) - first, min(all.end, first + w.n_tiles) - first};
}

constexpr int kPhaseVectors = (sizeof(Phase) + 15) / 16, kPhaseStride = (sizeof(Phase) + 127) / 128 * 128;
static_assert(sizeof(Phase) % 16 == 0 && kPhaseVectors <= 64);

// The next phase's description, asked early and put down late.
struct Coming {
    uint4 v[2];
    __device__ void ask(const Phase *from, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane + 32 * i < kPhaseVectors) v[i] = __ldg(reinterpret_cast<const uint4 *>(from) + lane + 32 * i);
    }
    __device__ void put(uint8_t *to, int lane) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane + 32 * i < kPhaseVectors) reinterpret_cast<uint4 *>(to)[lane + 32 * i] = v[i];
    }
};

// By a warp: 16 pieces of rows, too short for bulk copies, which cost 50 cycles each.
__device__ __forceinline__ void send_rows(const Weight &w, int tile, int chunk, uint32_t to, uint32_t barrier, uint64_t policy, int lane) {
    const uint8_t *from = w.data + (static_cast<int64_t>(tile) * 16 + (lane >> 4)) * w.row_bytes + chunk * 256 + (lane & 15) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) copy16_once(to + row_piece(2 * i + (lane >> 4), lane & 15), from + 2 * i * w.row_bytes, policy);
    if (lane == 0 && w.block_scale != nullptr)
        copy16_once(to + kRowsScaleAt, w.block_scale + static_cast<int64_t>(tile >> 3) * w.scale_stride + ((2 * chunk) & ~3), policy);
    barrier_follow(barrier);
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// Waits until the chunk that a ring was sent `back` chunks ago has landed; parity: what the next one's slot is awaited with.
__device__ __forceinline__ void await_landing(uint32_t full, const Slot &slot, int back, int n_slots) {
    const bool wraps = slot.at < back;
    barrier_wait(full + 8 * (wraps ? slot.at - back + n_slots : slot.at - back), wraps ? slot.parity : slot.parity ^ 1);
}

// A producer warp fills kWarps / kProducers rings, of which each of as many lanes knows one. Block formats: each of those lanes
// sends its ring's chunks. Row-major ones: the warp sends to one ring after the other.
struct Producer {
    static constexpr int kRings = kWarps / kProducers;
    uint64_t policy;
    uint32_t rings, full, empty;  // of the warp's first ring
    int lane, first, most_sent, n_slots, slot_bytes;
    Slot mine;

    // By one lane: sends `bytes` from one run of memory to its ring.
    __device__ __forceinline__ void send_run(const uint8_t *from, int bytes) {
        const uint32_t index = 8 * (lane * kMaxSlots + mine.at);
        // What lands later than it must keeps others waiting.
        if (most_sent) await_landing(full + 8 * lane * kMaxSlots, mine, most_sent > kRings ? 2 : 1, n_slots);
        barrier_wait(empty + index, mine.parity);
        barrier_expect(full + index, bytes);
        copy_bulk(rings + (lane * n_slots + mine.at) * slot_bytes, from, bytes, full + index, policy);
        mine.advance(n_slots);
    }
    __device__ __forceinline__ void send_weights(const Phase &phase) {
        const Range all = range_of(phase);
        const int is_gated = phase.is_gated;
#pragma unroll 1
        for (int i = 0; i < (is_gated ? 1 : phase.n_w); ++i) {
            const Range tiles = tiles_of(all, phase.w[i]);
            const int chunks = phase.w[i].n_chunks, n = max(0, tiles.end - tiles.begin) * (1 + is_gated) * chunks;
            if (!is_rows(phase.w[i].format)) {
                if (lane >= kRings) continue;
                const int bytes = block_chunk_bytes(phase.w[i].format);
                const uint8_t *const gate = phase.w[i].data, *const up = phase.w[is_gated ? 1 : i].data;
#pragma unroll 1
                for (int j = first + lane; j < n; j += kWarps) {
                    const int t = static_cast<uint32_t>(j) / static_cast<uint32_t>(chunks), chunk = j - t * chunks, tile = tiles.begin + (t >> is_gated);
                    send_run((t & is_gated ? up : gate) + (static_cast<int64_t>(tile) * chunks + chunk) * bytes, bytes);
                }
                continue;
            }
#pragma unroll 1
            for (int round = first; round < n; round += kWarps)
#pragma unroll 1
                for (int k = 0; k < kRings && round + k < n; ++k) {
                    const int j = round + k, t = static_cast<uint32_t>(j) / static_cast<uint32_t>(chunks), chunk = j - t * chunks, tile = tiles.begin + (t >> is_gated);
                    Slot slot;
                    if (most_sent) {
                        const int ring = (k - most_sent) & (kRings - 1);
                        slot = {__shfl_sync(~0u, mine.at, ring), __shfl_sync(~0u, mine.parity, ring)};
                        await_landing(full + 8 * ring * kMaxSlots, slot, (most_sent + kRings - 1) / kRings, n_slots);
                    }
                    slot = {__shfl_sync(~0u, mine.at, k), __shfl_sync(~0u, mine.parity, k)};
                    const uint32_t index = 8 * (k * kMaxSlots + slot.at);
                    barrier_wait(empty + index, slot.parity);
                    send_rows(phase.w[is_gated ? t & 1 : i], tile, chunk, rings + (k * n_slots + slot.at) * slot_bytes, full + index, policy, lane);
                    if (lane == k) mine.advance(n_slots);
                }
        }
        __syncwarp();
    }
    // Keys and values of the row's earlier tokens, a group of 16 positions to each ring in turn.
    __device__ __forceinline__ void send_positions(const Attend &t, const Arguments &a, const RowFacts &facts) {
        const Span span = span_of(t, facts.position);
        if (span.head < 0 || facts.is_dead) return;
        if (lane < kRings) {
            const int32_t *pages = a.page_table + static_cast<int64_t>(facts.slot) * a.slot_pages;
            const int n_pieces = group_pieces(slot_bytes, t.head_width), bytes = 32 * t.head_width / n_pieces;
            int at = span.first + (first + lane) * 16, page = at < span.last ? __ldg(pages + at / a.page_tokens) : 0;
#pragma unroll 1
            for (; at < span.last; at += 16 * kWarps) {
                const int next = at + 16 * kWarps < span.last ? __ldg(pages + (at + 16 * kWarps) / a.page_tokens) : 0;
                const uint8_t *from = a.kv + static_cast<int64_t>(page) * a.page_stride + (static_cast<int64_t>(span.head) * a.page_tokens + at % a.page_tokens) * (2 * t.head_width);
#pragma unroll 1
                for (int piece = 0; piece < 2 * n_pieces; ++piece)
                    send_run(from + (piece < n_pieces ? t.k_offset + piece * bytes : t.v_offset + (piece - n_pieces) * bytes), bytes);
                page = next;
            }
        }
        __syncwarp();
    }
};

__device__ __forceinline__ void produce(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    Producer producer;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % kProducers;
    uint8_t *phases = shared + layout.phases + warp * 2 * kPhaseStride;
    producer.lane = lane;
    producer.first = warp * Producer::kRings;
    producer.most_sent = a.most_sent;
    producer.n_slots = a.n_slots;
    producer.slot_bytes = a.slot_bytes;
    producer.policy = read_once_policy();
    producer.rings = shared_address(shared) + producer.first * a.n_slots * a.slot_bytes;
    producer.full = shared_address(s.full[producer.first]);
    producer.empty = shared_address(s.empty[producer.first]);
    producer.mine.parity = 1;  // the first round finds empty slots
    Coming coming;
    coming.ask(a.phases, lane);
    coming.put(phases, lane);
    __syncwarp();
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        const Phase &phase = *reinterpret_cast<const Phase *>(phases + (p & 1) * kPhaseStride);
        if (p + 1 < a.n_phases) coming.ask(a.phases + p + 1, lane);
        if (phase.kind == kMatmul) producer.send_weights(phase);
        else if (phase.kind == kAttend) producer.send_positions(phase.attend, a, s.row);
        __syncwarp();
        if (p + 1 < a.n_phases) coming.put(phases + ((p + 1) & 1) * kPhaseStride, lane);
        __syncwarp();
    }
    wait_async<0>();
}

__device__ __forceinline__ float finish(const Weight &w, int row, float v) {
    v *= w.scale;
    if (w.row_scale != nullptr) v *= __ldg(w.row_scale + row);
    return w.bias != nullptr ? v + __ldg(w.bias + row) : v;
}
__device__ __forceinline__ float gate_of(float v, int32_t act) { return act == PK_ACT_SILU ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, act); }

// Tiles of one weight (gate and up by turns) that are added up together.
struct Group {
    int first, n;       // among the weight's tiles of this block
    int chunks;         // of a tile
    int next;           // the next chunk of this warp, counted over all tiles
    int x_row;
    bool has_scales;
    const uint8_t *xs;
    float *sums;        // [tiles][warps][16 rows]
};

// This warp's chunks of the group.
template <int kFormat>
__device__ __forceinline__ void multiply(Group &g, Taker &taker) {
    const int lane = thread_here() & 31;
    Product<kFormat, 1> product;
    float *to = g.sums + (thread_here() >> 5) * 16;
    int next = g.next;
#pragma unroll 1
    for (int t = g.first; t < g.first + g.n; ++t, to += kWarps * 16) {
        product.clear();
        const int begin = t * g.chunks, end = begin + g.chunks;
#pragma unroll 1
        while (next < end) {
            const int chunk = next - begin, scale_at = g.has_scales ? 2 * chunk & 3 : -1;
            const bool is_pair = next + kWarps < end;
            taker.await(0);
            if (is_pair) {
                // Two at once: one's products hide the other's waits.
                taker.await(1);
                product.add(taker.slot_at(0), g.xs, g.x_row, chunk, scale_at, lane);
                product.add(taker.slot_at(1), g.xs, g.x_row, chunk + kWarps, scale_at, lane);
                __syncwarp();
                taker.release(lane, product.used());
            } else {
                product.add(taker.slot_at(0), g.xs, g.x_row, chunk, scale_at, lane);
                __syncwarp();
            }
            taker.release(lane, product.used());
            next += is_pair ? 2 * kWarps : kWarps;
        }
        product.store(to, lane);
    }
    g.next = next;
}

// Adds up what the warps left of a group, and writes it. factor: the norm's.
__device__ __forceinline__ void write_group(const Phase &phase, const Weight &w, const Group &g, int first_row, float factor, uint2 early, uint32_t base, int at) {
    const int lane = thread_here() & 31, is_gated = phase.is_gated, n_outputs = (g.n >> is_gated) * 16, first_column = w.first_column;
    const Place add = phase.add;
#pragma unroll 1
    for (int first = thread_here() & ~31; first < n_outputs; first += kConsumers) {
        const int o = first + lane, column = first_row + o;
        const bool is_valid = o < n_outputs && column < w.rows;
        float out = 0.0f;
        if (is_valid) {
            float v[2] = {0.0f, 0.0f};
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                if (side > is_gated) break;
                const float *sums = g.sums + ((o / 16 << is_gated) + side) * (kWarps * 16) + o % 16;
#pragma unroll
                for (int k = 0; k < kWarps; ++k) v[side] += sums[k * 16];
            }
            out = finish(w, column, v[0] * factor);
            if (is_gated) out = gate_of(out, phase.act) * finish(phase.w[1], column, v[1] * factor);
            out *= phase.scale;
            if (phase.softcap > 0.0f) out = phase.softcap * quick_tanh(__fdividef(out, phase.softcap));
            if (add.packets) {
                const uint32_t epoch = base + add.source + 1;
                if (first >= kConsumers || early.y != epoch) early = await_packet(added_at(add, first_column + column), epoch);
                out += add.format == PK_F32 ? __uint_as_float(early.x) : column & 1 ? high_f32(early.x) : low_f32(early.x);
            }
        }
        __syncwarp();
        write_output(phase.y, first_column + column, out, is_valid, base + at + 1);
    }
}

__device__ __forceinline__ int rows_in(const Phase &p, const Shared &s) {
    return p.rows_symbol == PK_ROWS_T ? s.n_tokens : p.rows_symbol == PK_ROWS_S ? s.n_samples : static_cast<int>(p.rows_symbol);
}

// False: nothing to do for this block, which has not met its other warps.
__device__ __forceinline__ bool matmul_phase(const Phase &phase, const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout, Taker &taker, int at) {
    const int warp = thread_here() >> 5, lane = thread_here() & 31, is_gated = phase.is_gated;
    uint8_t *xs = shared + layout.x;
    const Range all = range_of(phase);
    if (all.end <= all.begin) return false;
    const uint32_t base = s.base;
    const int x_index = phase.is_gathered ? s.gather : 0;
    const bool has_norm = phase.norm != nullptr, is_integer = phase.staging > kStageFp8, is_there = rows_in(phase, s) > 0;
    float squares;
    if (is_integer) squares = has_norm ? stage<true, true>(phase, a, at, xs, x_index, base) : stage<true, false>(phase, a, at, xs, x_index, base);
    else squares = has_norm ? stage<false, true>(phase, a, at, xs, x_index, base) : stage<false, false>(phase, a, at, xs, x_index, base);
    float *const shared_squares = s.squares[at & 1];
    if (has_norm) {
        squares = warp_sum(squares);
        if (lane == 0) shared_squares[warp] = squares;
    }
    // Usually a warp multiplies what it has staged itself.
    bool is_own = true;
    for (int i = 0; i < phase.n_w; ++i) is_own &= phase.w[i].n_chunks % kWarps == 0;
    if (is_own) __syncwarp();
    else join_consumers(kConsumers);
    mark(a, at, 3);
    bool is_first = true;
#pragma unroll 1
    for (int i = 0; i < (is_gated ? 1 : phase.n_w); ++i) {
        const Weight &w = phase.w[i];
        const Range tiles = tiles_of(all, w);
        if (tiles.end <= tiles.begin) continue;
        const int n_tiles = (tiles.end - tiles.begin) << is_gated, format = w.format, most = a.part_bytes / (4 * kWarps * 16) & ~1;
        Group g;
        g.chunks = w.n_chunks;
        g.next = warp;
        g.has_scales = w.block_scale != nullptr;
        g.x_row = x_row_bytes(phase.staging, phase.k);
        g.xs = xs;
#pragma unroll 1
        for (g.first = 0; g.first < n_tiles; g.first += most) {
            g.n = min(most, n_tiles - g.first);
            g.sums = reinterpret_cast<float *>(shared + layout.part + (taker.flip & 1) * a.part_bytes);
            taker.flip ^= 1;
            const int first_row = (tiles.begin + (g.first >> is_gated)) * 16;
            // What this thread's output is added to, asked early.
            uint2 early = {0, 0};
            if (phase.add.packets) {
                const int column = first_row + thread_here();
                if (thread_here() < (g.n >> is_gated) * 16 && column < w.rows) early = load_packet(added_at(phase.add, w.first_column + column));
            }
            switch (format) {
                case PK_BF16: multiply<PK_BF16>(g, taker); break;
                case PK_FP8_E4M3: multiply<PK_FP8_E4M3>(g, taker); break;
                case PK_Q8_0: multiply<PK_Q8_0>(g, taker); break;
                case PK_Q4_K: multiply<PK_Q4_K>(g, taker); break;
                default: multiply<PK_Q6_K>(g, taker); break;
            }
            mark(a, at, 4);
            wait_async<0>();
            join_consumers(kConsumers);
            mark(a, at, 5);
            float factor = 1.0f;
            if (has_norm) {
                float sum = 0.0f;
#pragma unroll
                for (int k = 0; k < kWarps; ++k) sum += shared_squares[k];
                factor = rsqrtf(sum * phase.inverse_k + phase.eps);
            }
            if (is_there) write_group(phase, w, g, first_row, factor, early, base, at);
            if (is_first && phase.normed.data && is_there && blockIdx.x == 0) write_normed(phase, x_index, factor, base);
            is_first = false;
        }
    }
    return true;
}

__device__ __forceinline__ void consume(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    uint8_t *phases = shared + layout.phases + 2 * kProducers * kPhaseStride;
    Taker taker;
    taker.n_slots = a.n_slots;
    taker.slot_bytes = a.slot_bytes;
    taker.ring = shared + warp * a.n_slots * a.slot_bytes;
    taker.full = shared_address(s.full[warp]);
    taker.empty = shared_address(s.empty[warp]);
    // The next phase's description is asked at the beginning of a phase and there at its end.
    auto ask = [&](int p) {
        if (warp == 0)
            for (int i = lane; i < kPhaseVectors; i += 32) copy16_async(shared_address(phases + (p & (kPhases - 1)) * kPhaseStride) + 16 * i, reinterpret_cast<const uint4 *>(a.phases + p) + i, true);
        commit_async();
    };
    ask(0);
    wait_async<0>();
    join_consumers(kConsumers);
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        mark(a, p, 0);
        const Phase &phase = *reinterpret_cast<const Phase *>(phases + (p & (kPhases - 1)) * kPhaseStride);
        if (p + 1 < a.n_phases) ask(p + 1);
        // A warp goes on as soon as all have come to the phase's last meeting: sums and descriptions are kept for those behind.
        bool has_met = false;
        if (phase.kind == kPublish) publish(phase, min(1, rows_in(phase, s)), s.base + p + 1);
        else if (phase.kind == kMatmul) has_met = matmul_phase(phase, a, s, shared, layout, taker, p);
        else if (phase.attend.head_width == 128) has_met = attend<128>(phase, a, s.row, shared + layout.x, taker, s.base, p);
        else has_met = attend<64>(phase, a, s.row, shared + layout.x, taker, s.base, p);
        if (!has_met) {
            wait_async<0>();
            join_consumers(kConsumers);
        }
        mark(a, p, 6);
    }
}

// What the step left for this launch.
__device__ __forceinline__ void read_step(const Arguments &a, Shared &s) {
    if (threadIdx.x != 32) return;
    s.n_tokens = a.info->n_tokens;
    s.n_samples = a.info->n_samples;
    s.base = __ldcg(a.epochs);
    if (s.n_tokens > 0 && a.row_position != nullptr) s.row = {a.row_position[0], a.row_slot[0], a.token_page[0], a.row_flags[0] & PK_ROW_DEAD};
    if (s.n_samples > 0 && a.sample_at != nullptr) s.gather = a.sample_at[0];
}

__global__ void __launch_bounds__(kThreads, 1) persist_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Shared s;
    const Layout layout = layout_of(a);
    if (threadIdx.x == 0) {
        for (int w = 0; w < kWarps; ++w)
            for (int i = 0; i < a.n_slots; ++i) {
                barrier_init(shared_address(&s.full[w][i]), 1);
                barrier_init(shared_address(&s.empty[w][i]), 1);
            }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        s.row = {0, 0, 0, 1};
        s.gather = 0;
    }
    __syncthreads();
    read_step(a, s);
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
        produce(a, s, shared, layout);
    } else {
        consume(a, s, shared, layout);
    }
    __syncthreads();
    // The last block to end moves the epoch on: all others have read it.
    if (threadIdx.x == 0 && atomicAdd(a.epochs + 1, 1) == gridDim.x - 1) {
        a.epochs[0] = s.base + a.n_phases;
        a.epochs[1] = 0;
    }
}

}  // namespace

template <int kRows>
int32_t launch_rows(const Launch &l, const Arguments &a, int n_blocks) {
    static_assert(kRows == 1);
    const int bytes = layout_of(a).end;
    if (int32_t e = check(cudaFuncSetAttribute(persist_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "persist")) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = l.stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeCooperative;
    attribute[0].val.cooperative = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    return check(cudaLaunchKernelEx(&config, persist_kernel, a), "persist");
}

}  // namespace pk::persist
#else
namespace pk::persist {
template <int kRows>
int32_t launch_rows(const Launch &, const Arguments &, int) {
    return fail(PK_UNSUPPORTED, "persist: this architecture has no such kernel");
}
}  // namespace pk::persist
#endif

template int32_t pk::persist::launch_rows<PK_PERSIST_ROWS>(const pk::Launch &, const pk::persist::Arguments &, int);
