// Products of 2 to 32 rows that read the same x, in one launch: queries, keys, values and gates of a layer; a router beside a shared expert. BF16 and e4m3.
//
// A task is 16 rows of a weight (a gate and its partner: 16 of each), of warps_k warps that take turns at the units of K; a warp's weights come by
// cp.async through a ring of its own that runs on from one task into the next. x lies in shared memory in pieces of some columns, row by row as it is, brought by one more warp
// with bulk copies; where not all of it fits, pieces follow each other through the buffers and a warp has one task at most. The 16-byte pieces of a row of weights change places
// (swizzle) so that lanes read them without conflicts.
#include "../../include/few_rows.cuh"

#include <algorithm>

#include "../../include/few_products.cuh"
#include "../../include/gemm.cuh"

namespace pk {
namespace {

constexpr int32_t kMostFewRows = 32;
constexpr int32_t kMostBuffers = 8, kMostColumnsLog = 10;  // of x
constexpr int64_t kMostShared = 226 * 1024;

// Warps and their units under way: some 50 to 100 KB of a block. x of many rows leaves room for eight warps only.
template <int kN>
constexpr int kFewSlots = 3;
template <int kN>
constexpr int kFewWarps = kN == 4 ? 8 : 16;

// Grid: multiprocessors. kN: groups of eight rows of x.
template <int kN>
__global__ void __launch_bounds__(32 * kFewWarps<kN> + 32, 1) few_rows_kernel(const __grid_constant__ FewRowsArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int kDeep = kFewSlots<kN>, kWarps = kFewWarps<kN>, kRed = 8 * kN + 1;
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ uint64_t full[kMostBuffers], empty[kMostBuffers];
    __shared__ float red[kWarps][16][kRed];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3, columns = 1 << a.columns_log, x_row_bytes = 2 * columns + 64, n_pieces = a.k >> a.columns_log;
    const uint32_t xs = shared_address(dynamic) + kWarps * kDeep * kFewSlotBytes;
    if (tid < a.n_buffers) {
        barrier_init(&full[tid], 1);
        barrier_init(&empty[tid], kWarps);
        fence_async_proxy();
    }
    __syncthreads();
    if (warp == kWarps) {
        wait_dependence();
        release_dependents();
#pragma unroll 1
        for (int i = 0; i < n_pieces; ++i) {
            const int buffer = i % a.n_buffers;
            if (i >= a.n_buffers) barrier_wait(&empty[buffer], (i / a.n_buffers - 1) & 1);
            if (lane == 0) barrier_expect(&full[buffer], a.max_rows * columns * 2);
            __syncwarp();
            if (lane < a.max_rows) copy_bytes(xs + (buffer * 8 * kN + lane) * x_row_bytes, a.x + lane * a.x_stride + i * columns, columns * 2, &full[buffer]);
        }
        return;
    }
    const int wk = warp % a.warps_k, team = warp / a.warps_k, all_teams = gridDim.x * (kWarps / a.warps_k), first = team * gridDim.x + blockIdx.x;
    const int n_tasks = first < a.n_tiles ? (a.n_tiles - first - 1) / all_teams + 1 : 0;

    // Where a warp is: one that loads and, behind it, one that multiplies.
    struct Cursor {
        int task, unit, end, which;
        FewTile tile;
    };
    auto begin = [&](Cursor &at, int task) {
        at.task = task;
        if (task >= n_tasks) return;
        const int tile = first + task * all_teams;
        int which = 0;
        for (int i = 1; i < a.n_w; ++i)
            if (tile >= a.w[i].first_tile) which = i;
        const FewWeight &w = a.w[which];
        const bool is_gated = w.n_sides > 1;
        const int row0 = (tile - w.first_tile) * (is_gated ? 8 : 16), row_bytes = w.is_fp8 ? a.k : 2 * a.k;
        at.which = which;
        at.unit = wk;
        at.end = row_bytes / kUnitBytes;
        at.tile.upper = w.data[0] + static_cast<int64_t>(row0 + r) * row_bytes + 16 * c;
        at.tile.lower = is_gated ? w.data[1] + static_cast<int64_t>(row0 + r) * row_bytes + 16 * c : at.tile.upper + 8 * row_bytes;
        const int64_t factors = (row0 >> 7) * w.factor_stride;
        at.tile.upper_factors = w.factors[0] != nullptr ? w.factors[0] + factors : nullptr;
        at.tile.lower_factors = is_gated && w.factors[0] != nullptr ? w.factors[1] + factors : at.tile.upper_factors;
    };
    Cursor loading = {}, multiplying = {};
    begin(loading, 0);
    multiplying = loading;
    FewRing<kDeep> ring(shared_address(dynamic) + warp * kDeep * kFewSlotBytes);
    auto ask = [&] {
        const bool is = loading.task < n_tasks;
        ring.ask(is, loading.tile, loading.unit);
        loading.unit += a.warps_k;
        if (is && loading.unit >= loading.end) begin(loading, loading.task + 1);
    };
#pragma unroll 1
    for (int i = 0; i < kDeep; ++i) ask();
    // The first weights are on their way while the kernels ahead end.
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol);
    int here = -1, released = 0;  // the piece of x that is here; pieces that this warp is done with
    uint32_t x_lane = 0;
    auto release_to = [&](int piece) {
        if (n_pieces <= a.n_buffers) return;
        __syncwarp();
        for (; released < piece; ++released) {
            barrier_wait(&full[released % a.n_buffers], released / a.n_buffers & 1);  // one that it has passed by: not ahead of the others
            if (lane == 0) barrier_arrive(&empty[released % a.n_buffers]);
        }
    };
    float acc[kN][4] = {};
#pragma unroll 1
    while (multiplying.task < n_tasks) {
        const FewWeight &w = a.w[multiplying.which];
        const int column = multiplying.unit * (w.is_fp8 ? 128 : 64), piece = column >> a.columns_log;
        if (piece != here) {
            here = piece;
            release_to(piece);
            barrier_wait(&full[piece % a.n_buffers], piece / a.n_buffers & 1);
            x_lane = xs + (piece % a.n_buffers * 8 * kN + r) * x_row_bytes + 16 * c;
        }
        const uint32_t slot = ring.take(), x = x_lane + (column - (piece << a.columns_log)) * 2;
        float raw[kN][4] = {};
        if (w.is_fp8) few_products<kN, true>(slot, x, x_row_bytes, raw);
        else few_products<kN, false>(slot, x, x_row_bytes, raw);
        few_add<kN>(acc, raw, ring.factors(slot));
        ask();
        multiplying.unit += a.warps_k;
        if (multiplying.unit < multiplying.end) continue;
#pragma unroll
        for (int q = 0; q < kN; ++q)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                red[warp][r + 8 * (i >> 1)][8 * q + 2 * c + (i & 1)] = acc[q][i];
                acc[q][i] = 0.0f;
            }
        auto team_sync = [&] {
            if (a.warps_k > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * a.warps_k) : "memory");
            else __syncwarp();
        };
        team_sync();
        const bool is_gated = w.n_sides > 1;
        const int rows = is_gated ? 8 : 16, in = lane & (rows - 1), row = (first + multiplying.task * all_teams - w.first_tile) * rows + in, per_warp = 32 / rows;
        if (row < w.rows) {
            const float bias = w.bias[0] != nullptr ? w.bias[0][row] : 0.0f;
#pragma unroll 1
            for (int n = wk * per_warp + lane / rows; n < n_rows; n += per_warp * a.warps_k) {
                float v = 0.0f, u = 0.0f;
#pragma unroll 1
                for (int k = 0; k < a.warps_k; ++k) {
                    v += red[warp - wk + k][in][n];
                    u += red[warp - wk + k][in + 8 & 15][n];
                }
                v = fmaf(v, w.scale[0], bias);
                if (is_gated) v = activate(v, w.act) * fmaf(u, w.scale[1], w.bias[1] != nullptr ? w.bias[1][row] : 0.0f);
                v *= a.gate != nullptr ? w.after / (1.0f + __expf(-load_as_f32(a.gate, n * a.gate_stride, a.gate_format))) : w.after;
                if (w.add != nullptr) v += load_as_f32(w.add, n * w.add_stride + row, w.add_format);
                store_from_f32(w.y, n * w.y_stride + row, w.y_format, v);
            }
        }
        team_sync();
        begin(multiplying, multiplying.task + 1);
    }
    release_to(n_pieces);
#endif
}

bool is_bf16_rows(const pk_tensor &x) { return x.format == PK_BF16 && x.data % 16 == 0 && x.stride % 16 == 0 && x.cols % 128 == 0; }
bool is_plain(const pk_tensor &y) { return y.format == PK_F32 || y.format == PK_BF16; }

// Adds a record's products; false when they are not for this kernel, and nothing is added.
bool add_products(const Launch &l, const pk_op_matmul &op, FewRowsArguments *out) {
    FewRowsArguments a = *out;
    const bool is_gated = op.act != PK_ACT_NONE;
    if (!is_bf16_rows(op.x) || op.x.rows != PK_ROWS_T || !is_plain(op.y) || (op.add.data && !is_plain(op.add)) || op.softcap > 0.0f || (is_gated && op.n_w != 2)) return false;
    if (a.n_w == 0) {
        a.x = reinterpret_cast<const bf16 *>(op.x.data);
        a.x_stride = op.x.stride / 2;
        a.k = static_cast<int32_t>(op.x.cols);
        a.rows_symbol = op.x.rows;
    } else if (a.x != reinterpret_cast<const bf16 *>(op.x.data) || a.k != op.x.cols || a.x_stride != op.x.stride / 2) {
        return false;
    }
    int64_t column = 0;
    for (int i = 0; i < op.n_w; ++i) {
        const Packed *p = find_packed(l.ctx, op.w[i]);
        if (p == nullptr || p->scale_kind == PK_SCALES_ROW || (p->format != PK_BF16 && p->format != PK_FP8_E4M3) || p->row_bytes != p->cols * (p->format == PK_BF16 ? 2 : 1)) return false;
        const int side = is_gated ? i : 0;
        if (side == 0 && a.n_w == FewRowsArguments::kMost) return false;
        FewWeight &w = side ? a.w[a.n_w - 1] : a.w[a.n_w++];
        if (side && (w.is_fp8 != (p->format == PK_FP8_E4M3) || w.rows != p->rows || w.factor_stride != p->scale_stride || (w.factors[0] != nullptr) != (p->scale_kind == PK_SCALES_BLOCK))) return false;
        w.data[side] = reinterpret_cast<const uint8_t *>(op.w[i].data);
        w.factors[side] = p->scale_kind == PK_SCALES_BLOCK ? reinterpret_cast<const float *>(w.data[side] + p->scales) : nullptr;
        w.bias[side] = reinterpret_cast<const float *>(op.bias[i].data);
        w.scale[side] = p->scale;
        w.n_sides = side + 1;
        if (side) continue;
        w.y = reinterpret_cast<uint8_t *>(op.y.data) + column * (op.y.format == PK_F32 ? 4 : 2);
        w.y_format = op.y.format;
        w.y_stride = op.y.stride / (op.y.format == PK_F32 ? 4 : 2);
        if (op.add.data) {
            w.add = reinterpret_cast<const uint8_t *>(op.add.data) + column * (op.add.format == PK_F32 ? 4 : 2);
            w.add_format = op.add.format;
            w.add_stride = op.add.stride / (op.add.format == PK_F32 ? 4 : 2);
        }
        w.rows = static_cast<int32_t>(p->rows);
        w.factor_stride = static_cast<int32_t>(p->scale_stride);
        w.first_tile = a.n_tiles;
        w.is_fp8 = p->format == PK_FP8_E4M3;
        w.act = op.act;
        w.after = op.scale;
        a.n_tiles += static_cast<int32_t>(is_gated ? (p->rows + 7) / 8 : (p->rows + 15) / 16);
        column += p->rows;
    }
    *out = a;
    return true;
}

int32_t groups_of(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

// A product whose x is rows times the sigmoid of a number each: the numbers multiply what comes out. False: something else.
bool add_gated(const Launch &l, const pk_op_sigmoid &gate, const Record &product, FewRows *few, int64_t at) {
    if (product.op != PK_OP_MATMUL || gate.g.cols != 1 || !is_plain(gate.g) || gate.out.data != gate.x.data || product.as<pk_op_matmul>().x.data != gate.x.data) return false;
    FewRows::Part part = {{at, at + 1}, {}};
    FewRowsArguments &a = part.products;
    if (!add_products(l, product.as<pk_op_matmul>(), &a) || a.w[0].n_sides != 1 || a.w[0].bias[0] != nullptr) return false;
    a.gate = reinterpret_cast<const void *>(gate.g.data);
    a.gate_format = gate.g.format;
    a.gate_stride = gate.g.stride / (gate.g.format == PK_F32 ? 4 : 2);
    few->parts.push_back(part);
    return true;
}

// How a launch of so many rows lies in shared memory; 0 bytes: it does not.
struct FewShape {
    int32_t columns_log = kMostColumnsLog, n_buffers = 0, warps_k = 0;
    int64_t bytes = 0;
};

FewShape shape_of(const Launch &l, const FewRowsArguments &a, int64_t rows) {
    FewShape s;
    const int32_t n = groups_of(rows), warps = n == 4 ? kFewWarps<4> : kFewWarps<1>;
    while (a.k % (1 << s.columns_log)) --s.columns_log;
    const int64_t reduced = int64_t{warps} * 16 * (8 * n + 1) * 4, ring = int64_t{warps} * (n == 4 ? kFewSlots<4> : kFewSlots<1>) * kFewSlotBytes, buffer = int64_t{8} * n * ((2 << s.columns_log) + 64);
    const int64_t n_pieces = a.k >> s.columns_log;
    s.n_buffers = static_cast<int32_t>(std::min<int64_t>({kMostBuffers, n_pieces, (kMostShared - ring - reduced) / buffer}));
    // The fewest rounds of units and tasks, and of waiting for each other; of equals, fewer warps a task. Every warp of a task has a unit.
    int64_t least = INT64_MAX, most = 0, fewest = INT64_MAX;  // units of a task
    for (int32_t i = 0; i < a.n_w; ++i) {
        const int64_t units = a.k / (a.w[i].is_fp8 ? 128 : 64);
        most = std::max(most, units);
        fewest = std::min(fewest, units);
    }
    for (int32_t w : {16, 8, 4, 2, 1}) {
        if (w > warps || w > fewest) continue;
        const int64_t teams = int64_t{l.ctx->n_processors} * (warps / w), tasks = (a.n_tiles + teams - 1) / teams, rounds = ((most + w - 1) / w + (w > 1 ? 2 : 1)) * tasks;
        if (rounds > least || (n_pieces > s.n_buffers && tasks > 1)) continue;
        least = rounds;
        s.warps_k = w;
    }
    if (s.n_buffers >= std::min<int64_t>(2, n_pieces) && s.warps_k > 0) s.bytes = ring + s.n_buffers * buffer;
    return s;
}

}  // namespace

std::vector<FewRows> find_few_rows(const Launch &l, const Records &records, const std::vector<Mixture> &mixtures) {
    std::vector<FewRows> found;
    if (!has_wgmma(l.ctx) || mixtures.empty()) return found;
    auto add = [&](FewRows *few, std::vector<int64_t> of) {
        FewRows::Part part = {of, {}};
        for (int64_t i : of)
            if (records[i].op != PK_OP_MATMUL || !add_products(l, records[i].as<pk_op_matmul>(), &part.products)) {
                part.products = {};
                break;
            }
        few->parts.push_back(part);
    };
    for (int64_t i = 0; i + 1 < records.n(); ++i) {
        const Mixture *mixture = nullptr;
        for (const Mixture &m : mixtures)
            if (m.first == i) mixture = &m;
        if (mixture == nullptr && records[i].op != PK_OP_NORM) continue;
        const uint64_t normed = mixture != nullptr ? reinterpret_cast<uint64_t>(mixture->arguments.normed) : records[i].as<pk_op_norm>().out.data;
        auto reads_norm = [&](int64_t j) { return j < records.n() && records[j].op == PK_OP_MATMUL && records[j].as<pk_op_matmul>().x.data == normed; };
        FewRows few;
        few.first = i;
        few.last = i + 1;
        if (mixture != nullptr) few.last = mixture->last;
        else
            while (reads_norm(few.last)) ++few.last;
        if (few.last == i + 1) continue;
        // Of a mixture, too, all that reads the norm comes first: what stands between writes nothing that those products read or write.
        std::vector<int64_t> together;
        for (int64_t j = i; j < few.last; ++j)
            if (reads_norm(j)) together.push_back(j);
        for (int64_t j = i; j < few.last; ++j) {
            if (j == together.front()) {
                add(&few, together);
            } else if (records[j].op == PK_OP_ROUTE && j + 1 < few.last && records[j + 1].op == PK_OP_EXPERTS) {
                add(&few, {j, j + 1});
                ++j;
            } else if (records[j].op == PK_OP_SIGMOID && j + 1 < few.last && add_gated(l, records[j].as<pk_op_sigmoid>(), records[j + 1], &few, j)) {
                ++j;
            } else if (!reads_norm(j)) {
                add(&few, {j});
            }
        }
        found.push_back(few);
        i = few.last - 1;
    }
    return found;
}

bool is_of_few_rows(const Launch &l) { return l.decode_only && l.max_tokens > 1 && l.max_tokens <= kMostFewRows; }

bool fits_few_rows(const Launch &l, const FewRowsArguments &products) { return products.n_w > 0 && shape_of(l, products, l.max_tokens).bytes > 0; }

int32_t launch_few_rows(const Launch &l, const FewRowsArguments &arguments) {
    FewRowsArguments a = arguments;
    const FewShape shape = shape_of(l, a, l.max_tokens);
    a.info = l.info;
    a.max_rows = l.max_tokens;
    a.columns_log = shape.columns_log;
    a.n_buffers = shape.n_buffers;
    a.warps_k = shape.warps_k;
    const dim3 blocks(l.ctx->n_processors);
    auto run = [&]<int kN>(void (*kernel)(FewRowsArguments)) { return launch(l, "few rows", kernel, blocks, dim3(32 * kFewWarps<kN> + 32), shape.bytes, a); };
    switch (groups_of(l.max_tokens)) {
        case 1: return run.template operator()<1>(few_rows_kernel<1>);
        case 2: return run.template operator()<2>(few_rows_kernel<2>);
        default: return run.template operator()<4>(few_rows_kernel<4>);
    }
}

}  // namespace pk
