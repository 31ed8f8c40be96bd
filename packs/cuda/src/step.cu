// The two ends of a step. Prepare reads the input block from pinned memory, applies it to the state and lays out rows and
// tokens; commit advances the rows and publishes results to pinned memory. One block each.
#include <climits>

#include "../include/commit.cuh"
#include "program.h"

namespace pk {
namespace {

using namespace step;

constexpr int kThreads = 1024;

// Inclusive sum over the block. `shared` holds 32 ints.
__device__ __forceinline__ int block_scan(int v, int *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int o = 1; o < 32; o <<= 1) {
        int up = __shfl_up_sync(~0u, v, o);
        if (lane >= o) v += up;
    }
    __syncthreads();
    if (lane == 31) shared[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int s = shared[lane];
        for (int o = 1; o < 32; o <<= 1) {
            int up = __shfl_up_sync(~0u, s, o);
            if (lane >= o) s += up;
        }
        shared[lane] = s;
    }
    __syncthreads();
    return v + (warp ? shared[warp - 1] : 0);
}

__global__ void __launch_bounds__(kThreads, 1) prepare_kernel(const __grid_constant__ pk_state s, StepInfo *info, const uint8_t *ring, int64_t ring_bytes, int n_ring, volatile StepReport *report,
                                                           const __grid_constant__ pk_op_pool pool) {
    __shared__ int scan[32];
    __shared__ int carried[2], past;
    constexpr int kShort = 1024;
    __shared__ __align__(16) uint2 begin[kShort / 8];
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x;
    const int turn = info->ring;
    const uint64_t begun = now_ns();
    const uint8_t *input = ring + (turn % n_ring) * ring_bytes;
    // The host's memory is a microsecond away: short inputs, which most are, come in one trip.
    if (tid < kShort / 8) begin[tid] = reinterpret_cast<const uint2 *>(input)[tid];
    __syncthreads();
    const pk_step_head head = *reinterpret_cast<const pk_step_head *>(begin);
    if (head.n_new == 0 && head.n_texts == 0 && head.n_masks == 0 && sizeof(pk_step_head) + head.n_rows * sizeof(pk_row) + head.n_pages * sizeof(pk_page_write) <= kShort)
        input = reinterpret_cast<const uint8_t *>(begin);
    const pk_new_slot *news = reinterpret_cast<const pk_new_slot *>(input + sizeof(pk_step_head));
    const pk_row *rows = reinterpret_cast<const pk_row *>(news + head.n_new);
    const pk_page_write *pages = reinterpret_cast<const pk_page_write *>(rows + head.n_rows);
    const pk_text *texts = reinterpret_cast<const pk_text *>(pages + head.n_pages);
    const pk_mask_write *masks = reinterpret_cast<const pk_mask_write *>(texts + head.n_texts);
    const int32_t *payload = reinterpret_cast<const int32_t *>(masks + head.n_masks);
    constexpr int kWords = sizeof(pk_sampling) / 4;
    for (int i = tid; i < head.n_new * kWords; i += kThreads) {
        const pk_new_slot &n = news[i / kWords];
        at<uint32_t>(s.sampling)[static_cast<int64_t>(n.slot) * kWords + i % kWords] = reinterpret_cast<const uint32_t *>(&n.sampling)[i % kWords];
    }
    for (int i = tid; i < head.n_new; i += kThreads) {
        at<int32_t>(s.length)[news[i].slot] = news[i].length;
        at<int32_t>(s.alive)[news[i].slot] = 1;
    }
    for (int i = 0; i < head.n_new; ++i) {
        const int n = news[i].sampling.n_bias * 2;
        for (int j = tid; j < n; j += kThreads) at<int32_t>(s.bias)[static_cast<int64_t>(news[i].slot) * s.max_bias * 2 + j] = payload[news[i].bias_offset + j];
    }
    for (int i = tid; i < head.n_pages; i += kThreads)
        if (const uint64_t table = pages[i].reserved == PK_PAGE_OF_POOL ? pool.page_table : s.page_table)
            at<int32_t>(table)[static_cast<int64_t>(pages[i].slot) * s.slot_pages + pages[i].index] = pages[i].page;
    for (int i = 0; i < head.n_texts; ++i) {
        const pk_text t = texts[i];
        int32_t *to = at<int32_t>(s.tokens) + t.slot * (static_cast<int64_t>(s.max_ctx_tokens) + 1) + t.position;
        for (int j = tid; j < t.n; j += kThreads) to[j] = payload[t.offset + j];
    }
    const int words = (s.n_vocab + 31) / 32;
    for (int i = 0; i < head.n_masks; ++i)
        for (int j = tid; j < words; j += kThreads) at<int32_t>(s.mask)[static_cast<int64_t>(masks[i].slot) * words + j] = payload[masks[i].offset + j];
    if (tid < 2) carried[tid] = 0;
    if (tid == 0) past = INT_MAX;
    __syncthreads();

    for (int first = 0; first < head.n_rows; first += kThreads) {
        const int r = first + tid;
        pk_row row = {0, 0, 0, 0};
        bool is_alive = false;
        int length = 0;
        if (r < head.n_rows) {
            row = rows[r];
            length = at<int32_t>(s.length)[row.slot];
            is_alive = at<int32_t>(s.alive)[row.slot] != 0;
            // A live row that does not fit in the context would write past its tokens: it counts as dead in this step, and
            // who waits for the step is told.
            if (is_alive && (length < 0 || length + row.n_tokens > s.max_ctx_tokens)) {
                atomicMin(&past, r);
                is_alive = false;
            }
        }
        const int n_draws = draws_of(row.flags, row.n_tokens);
        const int end = block_scan(row.n_tokens, scan) + carried[0], sample = block_scan(n_draws, scan) + carried[1];
        if (r < head.n_rows) {
            at<int32_t>(s.row_slot)[r] = row.slot;
            at<int32_t>(s.row_start)[r + 1] = end;
            at<int32_t>(s.row_position)[r] = is_alive ? length : 0;
            at<int32_t>(s.row_flags)[r] = (row.flags & (PK_ROW_SAMPLE | PK_ROW_DRAFT | PK_ROW_SCORE | PK_ROW_HELD)) | (is_alive ? 0 : PK_ROW_DEAD);
            for (int i = 1; i <= n_draws; ++i) {
                at<int32_t>(s.sample_row)[sample - i] = r;
                at<int32_t>(s.sample_at)[sample - i] = end - i;
            }
        }
        __syncthreads();
        if (tid == kThreads - 1) {
            carried[0] = end;
            carried[1] = sample;
        }
        __syncthreads();
    }
    if (tid == 0) at<int32_t>(s.row_start)[0] = 0;
    __syncthreads();

    const int32_t *start = at<int32_t>(s.row_start);
    for (int t = tid; t < head.n_tokens; t += kThreads) {
        int low = 0, high = head.n_rows;  // start[low] <= t < start[high]
        while (high - low > 1) {
            const int mid = (low + high) >> 1;
            if (start[mid] <= t) low = mid; else high = mid;
        }
        const int slot = at<int32_t>(s.row_slot)[low];
        const bool is_alive = !(at<int32_t>(s.row_flags)[low] & PK_ROW_DEAD);
        const int position = is_alive ? at<int32_t>(s.row_position)[low] + t - start[low] : 0;
        const int token = is_alive ? at<int32_t>(s.tokens)[slot * (static_cast<int64_t>(s.max_ctx_tokens) + 1) + position] : 0;
        at<int32_t>(s.token_id)[t] = token < 0 || token >= s.n_vocab ? 0 : token;
        at<int32_t>(s.token_position)[t] = position;
        at<int32_t>(s.token_row)[t] = low;
        const int64_t entry = static_cast<int64_t>(slot) * s.slot_pages + position / s.page_tokens;
        at<int32_t>(s.token_page)[t] = is_alive ? at<int32_t>(s.page_table)[entry] : 0;
        if (pool.kv) at<int32_t>(pool.token_page)[t] = is_alive ? at<int32_t>(pool.page_table)[entry] : 0;
    }
    if (tid == 0) {
        info->seq = head.seq;
        info->n_tokens = head.n_tokens;
        info->n_rows = head.n_rows;
        info->n_samples = head.n_samples;
        info->ring = turn + 1;
        info->begun_ns = begun;
        info[1].n_tokens = max(1, head.n_samples);  // kernels want one
        if (past != INT_MAX) {
            report->row = past;
            report->slot = rows[past].slot;
            report->end = static_cast<int64_t>(at<int32_t>(s.length)[rows[past].slot]) + rows[past].n_tokens;
            __threadfence_system();
            report->past_seq = head.seq;
            __threadfence_system();
        }
        report->consumed = static_cast<uint64_t>(turn) + 1;
    }
}

// Draws of the step before those of row `r`.
__device__ __forceinline__ int first_draw(const pk_state &s, const StepInfo *info, int r) {
    int low = 0, high = info->n_samples;
    while (low < high) {
        const int mid = (low + high) >> 1;
        if (at<int32_t>(s.sample_row)[mid] < r) low = mid + 1; else high = mid;
    }
    return low;
}

// A block per row. `input`: a block of pk_finish. A draft row draws as often as it has masks, which lie side by side.
__global__ void __launch_bounds__(kThreads) masks_kernel(const __grid_constant__ pk_state s, const StepInfo *info, const uint8_t *__restrict__ input, int n_masks) {
    __shared__ int first, last;
    wait_dependence();
    release_dependents();
    const int r = blockIdx.x, tid = threadIdx.x, flags = at<int32_t>(s.row_flags)[r];
    if (!(flags & PK_ROW_HELD)) return;
    const int slot = at<int32_t>(s.row_slot)[r], words = (s.n_vocab + 31) / 32;
    const int32_t *slots = reinterpret_cast<const int32_t *>(input + sizeof(pk_finish_head));
    if (tid == 0) {
        first = n_masks;
        last = -1;
    }
    __syncthreads();
    for (int i = tid; i < n_masks; i += kThreads)
        if (slots[i] == slot) {
            atomicMin(&first, i);
            atomicMax(&last, i);
        }
    __syncthreads();
    if (last < 0) {
        if (tid == 0) at<int32_t>(s.row_flags)[r] = flags | PK_ROW_DEAD;
        return;
    }
    int n = 1;
    int64_t place = slot;
    if (flags & PK_ROW_DRAFT) {
        n = min(last - first + 1, at<int32_t>(s.row_start)[r + 1] - at<int32_t>(s.row_start)[r]);
        place = s.n_slots + first_draw(s, info, r);
        if (tid == 0) at<int32_t>(s.row_flags)[r] = flags | n << kMaskedAt;
    }
    const int32_t *__restrict__ from = slots + n_masks + static_cast<int64_t>(first) * words;
    int32_t *__restrict__ to = at<int32_t>(s.mask) + place * words;
#pragma unroll 4
    for (int j = tid; j < n * words; j += kThreads) to[j] = from[j];
}

__global__ void __launch_bounds__(kThreads) commit_kernel(const __grid_constant__ pk_state s, const StepInfo *info, uint64_t *times) {
    __shared__ int scan[32];
    __shared__ int carried[2];
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x, n_rows = info->n_rows;
    pk_result *results = results_of(s, info);
    if (tid < 2) carried[tid] = 0;
    __syncthreads();
    for (int first = 0; first < n_rows; first += kThreads) {
        const int r = first + tid;
        const int flags = r < n_rows ? at<int32_t>(s.row_flags)[r] : 0;
        const int n = r < n_rows ? at<int32_t>(s.row_start)[r + 1] - at<int32_t>(s.row_start)[r] : 0;
        const int n_draws = draws_of(flags, n), n_results = flags & PK_ROW_DRAFT ? n : r < n_rows ? 1 : 0;
        const int end = block_scan(n_draws, scan) + carried[0], result = block_scan(n_results, scan) + carried[1];
        if (r < n_rows) commit_row(s, results, r, end, result);
        __syncthreads();
        if (tid == kThreads - 1) {
            carried[0] = end;
            carried[1] = result;
        }
        __syncthreads();
    }
    __threadfence_system();
    __syncthreads();
    if (tid == 0) tell_done(s, info, times);
}

}  // namespace

int32_t kernels_run() {
    cudaFuncAttributes attributes;
    return check(cudaFuncGetAttributes(&attributes, commit_kernel), "open");
}

int32_t launch_prepare(const Launch &l) { return launch_prepare_pool(l, {}); }

int32_t launch_prepare_pool(const Launch &l, const pk_op_pool &pool) {
    return launch(l, "prepare", prepare_kernel, dim3(1), dim3(kThreads), 0, *l.state, l.info, reinterpret_cast<const uint8_t *>(l.ring), l.ring_bytes, l.n_ring,
                  reinterpret_cast<volatile StepReport *>(l.consumed), pool);
}

int32_t launch_masks(const Launch &l, const uint8_t *input, int32_t n_masks, int32_t n_rows) {
    return launch(l, "finish", masks_kernel, dim3(n_rows), dim3(kThreads), 0, *l.state, static_cast<const StepInfo *>(l.info), input, n_masks);
}

int32_t launch_commit(const Launch &l) { return launch(l, "commit", commit_kernel, dim3(1), dim3(kThreads), 0, *l.state, static_cast<const StepInfo *>(l.info), reinterpret_cast<uint64_t *>(l.consumed) + kTimesAt); }

}  // namespace pk
