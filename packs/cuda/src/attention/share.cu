// Which rows of a step begin with the same pages: their common positions are read once for all of them (cascade attention).
//
// Rows of one token whose page tables agree in the page that holds position kShareLeast - 1 form a group around the first of
// them; the group shares as many whole pages as all its members have in common with the first. A block per row compares
// pages; the last block to arrive builds the groups and cuts their work so that the device is filled once. Once a step.
// Grid: rows of the bucket. Does not handle: prefixes shared by a part of a group beyond what all its members share.
#include <algorithm>

#include "../../include/attention_share.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256;

struct ShareArguments {
    const StepInfo *info;
    const int32_t *row_slot, *row_start, *row_position, *row_flags, *page_table;
    Share share;
    int32_t slot_pages, page_tokens, n_kv_heads, group, n_processors;
};

__device__ __forceinline__ bool may_share(const ShareArguments &a, int r) {
    return a.row_start[r + 1] - a.row_start[r] == 1 && !(a.row_flags[r] & PK_ROW_DEAD) && a.row_position[r] >= kShareLeast;
}

// Groups from the leaders: counts and places in `members`; how their positions are cut.
__device__ void build_groups(const ShareArguments &a, int n_rows, int *count, int *least, int *group_of) {
    const int tid = threadIdx.x;
    for (int r = tid; r < n_rows; r += kThreads) {
        count[r] = 0;
        least[r] = 1 << 30;
    }
    __syncthreads();
    for (int r = tid; r < n_rows; r += kThreads)
        if (const int2 mine = __ldcg(a.share.leaders + r); mine.x >= 0) {
            atomicAdd(&count[mine.x], 1);
            atomicMin(&least[mine.x], mine.y);
        }
    __syncthreads();
    if (tid == 0) {
        int n = 0, members = 0, tiles = 0;
        int64_t work = 0;  // tiles of 128 pairs x 128 positions
        for (int r = 0; r < n_rows; ++r) {
            group_of[r] = -1;
            if (count[r] < 2 || least[r] < kShareLeast) continue;
            group_of[r] = n;
            ShareGroup g = {};
            g.first = members;
            g.count = count[r];
            g.tokens = least[r];
            g.pairs = g.count * a.group;
            members += g.count;
            const int g_tiles = (g.pairs + 127) / 128 * a.n_kv_heads;
            tiles += g_tiles;
            work += static_cast<int64_t>(g_tiles) * ((g.tokens + 127) / 128);
            a.share.groups[n++] = g;
        }
        // Positions of an item: as few as keep the items within whole rounds of the device.
        const int rounds = max(1, (tiles + a.n_processors - 1) / a.n_processors), room = rounds * a.n_processors;
        int length = max(2, static_cast<int>((work + room - 1) / room));
        for (int turn = 0; turn < 16; ++turn) {
            int items = 0;
            for (int g = 0; g < n; ++g) {
                const ShareGroup &x = a.share.groups[g];
                items += (x.pairs + 127) / 128 * a.n_kv_heads * (((x.tokens + 127) / 128 + length - 1) / length);
            }
            if (items <= room) break;
            length += (length + 15) / 16;
        }
        int base = 0;
        for (int g = 0; g < n; ++g) {
            ShareGroup &x = a.share.groups[g];
            x.length = length * 128;
            x.n_pieces = (x.tokens + x.length - 1) / x.length;
            x.part = base;
            base += x.n_pieces * a.n_kv_heads * x.pairs;
        }
        a.share.head->n_groups = n;
    }
    __syncthreads();
    for (int r = tid; r < n_rows; r += kThreads) {
        const int leader = __ldcg(a.share.leaders + r).x, g = leader >= 0 ? group_of[leader] : -1;
        ShareRow row = {};
        if (g >= 0) {
            int index = 0;
            for (int i = 0; i < r; ++i) index += __ldcg(a.share.leaders + i).x == leader;
            const ShareGroup &x = a.share.groups[g];
            a.share.members[x.first + index] = r;
            row = {x.tokens, x.part + index * a.group, x.pairs, x.n_pieces};
        }
        a.share.rows[r] = row;
    }
}

__global__ void __launch_bounds__(kThreads) attention_share_kernel(const __grid_constant__ ShareArguments a) {
    extern __shared__ int shared[];
    __shared__ int leader, first_other, is_last;
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x, n_rows = a.info->n_rows, r = blockIdx.x, at = kShareLeast / a.page_tokens - 1;
    if (tid == 0) {
        leader = r;
        first_other = 1 << 30;
    }
    __syncthreads();
    const bool mine = r < n_rows && may_share(a, r);
    if (mine) {
        const int32_t *pages = a.page_table + static_cast<int64_t>(a.row_slot[r]) * a.slot_pages;
        const int key = pages[at];
        for (int i = tid; i < r; i += kThreads)
            if (may_share(a, i) && a.page_table[static_cast<int64_t>(a.row_slot[i]) * a.slot_pages + at] == key) atomicMin(&leader, i);
        __syncthreads();
        const int32_t *other = a.page_table + static_cast<int64_t>(a.row_slot[leader]) * a.slot_pages;
        const int n = min(a.row_position[r], a.row_position[leader]) / a.page_tokens;
        if (leader != r)
            for (int i = tid; i < n; i += kThreads)
                if (pages[i] != other[i]) {
                    atomicMin(&first_other, i);
                    break;
                }
        __syncthreads();
        if (tid == 0) {
            const int common = min(first_other, n) * a.page_tokens;
            __stcg(a.share.leaders + r, common >= kShareLeast ? make_int2(leader, common) : make_int2(-1, 0));
        }
    } else if (tid == 0 && r < n_rows) {
        __stcg(a.share.leaders + r, make_int2(-1, 0));
    }
    if (tid == 0) {
        __threadfence();
        is_last = atomicAdd(&a.share.head->arrived, 1) == static_cast<int>(gridDim.x) - 1;
        if (is_last) a.share.head->arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) build_groups(a, n_rows, shared, shared + n_rows, shared + 2 * n_rows);
}

}  // namespace

int64_t share_bytes(const pk_state &s) { return (sizeof(ShareHead) + static_cast<int64_t>(s.max_step_rows) * (sizeof(ShareRow) + sizeof(ShareGroup) + sizeof(int2) + 4) + 255) / 256 * 256; }

Share share_of(const pk_state &s, uint8_t *memory) {
    Share share;
    share.head = reinterpret_cast<ShareHead *>(memory);
    share.rows = reinterpret_cast<ShareRow *>(memory + sizeof(ShareHead));
    share.groups = reinterpret_cast<ShareGroup *>(share.rows + s.max_step_rows);
    share.leaders = reinterpret_cast<int2 *>(share.groups + s.max_step_rows);
    share.members = reinterpret_cast<int32_t *>(share.leaders + s.max_step_rows);
    return share;
}

int32_t share_least() { return kShareLeast; }

bool can_share(const pk_state &s) { return s.max_step_rows >= 2 && s.max_step_rows <= 2048 && s.page_tokens <= kShareLeast && kShareLeast % s.page_tokens == 0 && s.max_ctx_tokens > kShareLeast; }

int32_t launch_share(const Launch &l, const pk_op_attention &op) {
    const pk_state &s = *l.state;
    ShareArguments a = {};
    a.info = l.info;
    a.row_slot = reinterpret_cast<const int32_t *>(s.row_slot);
    a.row_start = reinterpret_cast<const int32_t *>(s.row_start);
    a.row_position = reinterpret_cast<const int32_t *>(s.row_position);
    a.row_flags = reinterpret_cast<const int32_t *>(s.row_flags);
    a.page_table = reinterpret_cast<const int32_t *>(s.page_table);
    a.share = share_of(s, l.share);
    a.slot_pages = s.slot_pages;
    a.page_tokens = s.page_tokens;
    a.n_kv_heads = op.n_kv_heads;
    a.group = op.n_heads / op.n_kv_heads;
    a.n_processors = l.ctx->n_processors;
    const int rows = std::min(l.max_tokens, s.max_step_rows);
    return launch(l, "attention share", attention_share_kernel, dim3(rows), dim3(kThreads), 3 * 4 * s.max_step_rows, a);
}

}  // namespace pk
