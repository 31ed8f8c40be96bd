// A lone row's products that read the same norm, in one launch: queries, keys, values and gates of a layer, in BF16 and one other format.
//
// Every block norms the row for itself while its first weights are on their way. A task is 16 rows of a weight, of warps_k warps that take
// turns at the units of K; a warp's loads run on from one task into the next.
#include "../../include/abreast.cuh"
#include "../../include/lone_row.cuh"

namespace pk {
namespace {

template <int kFormat>
__global__ void __launch_bounds__(kLoneThreads, 1) abreast_kernel(const __grid_constant__ AbreastArguments a) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    WarpRing ring(dynamic);
    __shared__ float red[kBlockWarps][16], sums[2 * kBlockWarps];
    __shared__ int rows_here;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r = lane >> 2, c = lane & 3;
    const int wk = warp % a.warps_k, team = warp / a.warps_k, all_teams = gridDim.x * (kBlockWarps / a.warps_k), first = team * gridDim.x + blockIdx.x;
    uint8_t *shared = dynamic + kRingBytes, *x_plain = shared, *x_own = kFormat == PK_BF16 ? x_plain : shared + 2 * a.m;
    const int n_tasks = first < a.n_tiles ? (a.n_tiles - first - 1) / all_teams + 1 : 0;

    // Where a warp is: one that loads and, behind it, one that multiplies.
    struct Cursor {
        int task, unit, end, which;
        Rows16 rows;
        bool is_own;
    };
    auto begin = [&](Cursor &at, int task) {
        at.task = task;
        if (task >= n_tasks) return;
        const int tile = first + task * all_teams;
        int which = 0;
        for (int i = 1; i < a.n_w; ++i)
            if (tile >= a.w[i].first_tile) which = i;
        const AbreastWeight &w = a.w[which];
        const int row0 = (tile - w.first_tile) * 16;
        at.which = which;
        at.is_own = w.is_own;
        at.unit = wk;
        at.end = a.m / (w.is_own ? Rows<kFormat>::kU : Rows<PK_BF16>::kU);
        at.rows = Rows16(w.w, w.w.data, row0);
    };
    Cursor loading, using_;
    begin(loading, 0);
    begin(using_, 0);
    auto ask = [&](int) {
        const bool is = loading.task < n_tasks;
        ring.ask(is, loading.rows, loading.unit);
        loading.unit += a.warps_k;
        if (is && loading.unit >= loading.end) begin(loading, loading.task + 1);
    };
    // The first weights, and the norm's, are on their way while the kernel before this one ends.
    prime(ask);
    NormedPart x;
    x.load_weight(a.norm, a.m);
    wait_dependence();
    release_dependents();
    if (threadIdx.x == 0) rows_here = rows_of(a.info, a.rows_symbol);
    x.load(a.residual, a.m);
    const float x_scale = x.template stage<kFormat>(a.eps, a.m, x_plain, x_own, a.normed, sums);
    if (rows_here < 1) return;
    float acc[2] = {};
#pragma unroll 1
    while (using_.task < n_tasks) {
        RowsRegisters unit;
        const float factor = ring.take(unit);
        if (kFormat == PK_BF16 || !using_.is_own) multiply_row<PK_BF16>(unit, acc, x_plain + c * 16 + using_.unit * 128, factor);
        else multiply_row<kFormat>(unit, acc, x_own + c * 16 + using_.unit * 2 * Rows<kFormat>::kU, factor);
        ask(0);
        using_.unit += a.warps_k;
        if (using_.unit < using_.end) continue;
        const AbreastWeight &w = a.w[using_.which];
        const int row = (first + using_.task * all_teams - w.first_tile) * 16 + lane;
        if (a.warps_k > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * a.warps_k) : "memory");
        if (c == 0) {
            red[warp][r] = acc[0];
            red[warp][r + 8] = acc[1];
        }
        if (a.warps_k > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * a.warps_k) : "memory");
        else __syncwarp();
        if (wk == 0 && lane < 16 && row < w.w.rows) {
            float v = 0.0f;
#pragma unroll 1
            for (int k = 0; k < a.warps_k; ++k) v += red[warp + k][lane];
            v *= w.is_own ? w.scale * x_scale : w.scale;
            store_from_f32(w.y, row, w.y_format, w.bias != nullptr ? v + w.bias[row] : v);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[i] = 0.0f;
        begin(using_, using_.task + 1);
    }
}

}  // namespace

std::vector<Abreast> find_abreast(const Launch &l, const Records &records) {
    std::vector<Abreast> found;
    for (int64_t i = 0; i + 2 < records.n(); ++i) {
        if (records[i].op != PK_OP_NORM) continue;
        const auto &norm = records[i].as<pk_op_norm>();
        if (norm.x.format != PK_F32 || norm.out.format != PK_BF16 || norm.kind != PK_NORM_RMS || !norm.w.data || norm.bias.data || norm.post_w.data || norm.residual.data || norm.x.rows != PK_ROWS_T) continue;
        Abreast made;
        AbreastArguments &a = made.arguments;
        made.format = PK_BF16;
        a.norm = reinterpret_cast<const float *>(norm.w.data);
        a.residual = reinterpret_cast<const float *>(norm.x.data);
        a.normed = reinterpret_cast<bf16 *>(norm.out.data);
        a.rows_symbol = norm.x.rows;
        a.m = static_cast<int32_t>(norm.x.cols);
        a.eps = norm.eps;
        auto take = [&](const pk_op_matmul &op) {
            if (op.act != PK_ACT_NONE || op.softcap > 0.0f || op.scale != 1.0f || op.add.data || op.x.data != norm.out.data || op.x.cols != norm.out.cols || a.n_w + op.n_w > AbreastArguments::kMost) return false;
            int64_t column = 0;
            const int32_t before = a.n_w, tiles = a.n_tiles;
            for (int k = 0; k < op.n_w; ++k) {
                const Packed *p = find_packed(l.ctx, op.w[k]);
                if (p == nullptr || p->scale_kind == PK_SCALES_ROW || (p->format != PK_BF16 && p->format != PK_FP8_E4M3)) {
                    a.n_w = before;
                    a.n_tiles = tiles;
                    return false;
                }
                AbreastWeight &w = a.w[a.n_w++];
                w.w.data = reinterpret_cast<const uint8_t *>(op.w[k].data);
                w.w.row_bytes = p->row_bytes;
                w.w.block_scale_at = p->scale_kind == PK_SCALES_BLOCK ? p->scales : -1;
                w.w.block_stride = static_cast<int32_t>(p->scale_stride);
                w.w.rows = static_cast<int32_t>(p->rows);
                w.bias = reinterpret_cast<const float *>(op.bias[k].data);
                w.y = reinterpret_cast<uint8_t *>(op.y.data) + column * (op.y.format == PK_F32 ? 4 : 2);
                w.y_format = op.y.format;
                w.first_tile = a.n_tiles;
                w.is_own = p->format != PK_BF16;
                w.scale = p->scale;
                if (w.is_own) made.format = p->format;
                a.n_tiles += static_cast<int32_t>((p->rows + 15) / 16);
                column += p->rows;
            }
            return true;
        };
        int64_t next = i + 1;
        while (next < records.n() && records[next].op == PK_OP_MATMUL && take(records[next].as<pk_op_matmul>())) ++next;
        if (next < i + 3 || a.m % 128 || a.m > kMostNormed) continue;
        // The fewest rounds of units and tasks; of equals, fewer warps a task.
        const int64_t units = a.m / 128;
        int64_t least = INT64_MAX;
        for (int32_t n : {16, 8, 4, 2, 1}) {
            if (n > units) continue;
            const int64_t teams = int64_t{l.ctx->n_processors} * (kBlockWarps / n), rounds = units / n * ((a.n_tiles + teams - 1) / teams);
            if (rounds <= least) {
                least = rounds;
                a.warps_k = n;
            }
        }
        made.first = i;
        made.last = next;
        found.push_back(made);
        i = next - 1;
    }
    return found;
}

int32_t launch_abreast(const Launch &l, const Abreast &abreast) {
    AbreastArguments a = abreast.arguments;
    a.info = l.info;
    Launch own = l;
    own.overlap = kOverlaps;
    const dim3 blocks(l.ctx->n_processors), threads(kLoneThreads);
    return abreast.format == PK_BF16 ? launch(own, "abreast", abreast_kernel<PK_BF16>, blocks, threads, kRingBytes + 2 * a.m, a) : launch(own, "abreast", abreast_kernel<PK_FP8_E4M3>, blocks, threads, kRingBytes + 4 * a.m, a);
}

}  // namespace pk
