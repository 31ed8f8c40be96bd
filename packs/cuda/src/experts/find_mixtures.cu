// Which records of a program are a mixture that src/experts/mixture.cu takes in one launch, and what that launch is told.
#include <algorithm>

#include "../../include/lone_row.cuh"
#include "../../include/mixture.cuh"

namespace pk {
namespace {

// Reads records as one mixture. False: not for this kernel.
struct Reader {
    const Launch &l;
    const Records &records;
    Mixture *out;
    int64_t next;

    bool is(int32_t op) const { return next < records.n() && records[next].op == op; }
    const Packed *plain(const pk_tensor &w, int32_t format) const {
        const Packed *p = find_packed(l.ctx, w);
        return p != nullptr && p->format == format && p->scale_kind != PK_SCALES_ROW ? p : nullptr;
    }
    ExpertWeight weight(const pk_tensor &w) const {
        const Packed &p = *find_packed(l.ctx, w);
        ExpertWeight e = {};
        e.data = reinterpret_cast<const uint8_t *>(w.data);
        e.stride = w.stride;
        e.row_bytes = p.row_bytes;
        e.scale_at = p.scale_at;
        e.row_scale_at = -1;
        e.block_scale_at = p.scale_kind == PK_SCALES_BLOCK ? p.scales : -1;
        e.rows = static_cast<int32_t>(p.rows);
        e.padded_rows = static_cast<int32_t>(p.padded_rows);
        e.block_stride = static_cast<int32_t>(p.scale_stride);
        return e;
    }
    static bool same(const pk_tensor &a, const pk_tensor &b) { return a.data == b.data && a.cols == b.cols && a.format == b.format; }

    // The product that ends the branch before, whose format is seen to later.
    void product_before() {
        MixtureArguments &a = out->arguments;
        if (!is(PK_OP_MATMUL) || next + 1 >= records.n() || records[next + 1].op != PK_OP_NORM) return;
        const auto &op = records[next].as<pk_op_matmul>();
        if (op.n_w != 1 || op.act != PK_ACT_NONE || op.softcap > 0.0f || op.bias[0].data || op.x.format != PK_BF16 || op.x.data % 16 || op.x.rows != PK_ROWS_T || op.y.format != PK_F32) return;
        if (op.add.data != op.y.data || op.y.data != records[next + 1].as<pk_op_norm>().x.data || find_packed(l.ctx, op.w[0]) == nullptr) return;
        a.before = weight(op.w[0]);
        a.before_x = reinterpret_cast<const bf16 *>(op.x.data);
        a.before_k = static_cast<int32_t>(op.x.cols);
        a.before_scale = op.scale;
        ++next;
    }

    bool norm_and_router() {
        MixtureArguments &a = out->arguments;
        if (!is(PK_OP_NORM)) return false;
        const auto &norm = records[next].as<pk_op_norm>();
        if (norm.x.format != PK_F32 || norm.out.format != PK_BF16 || norm.kind != PK_NORM_RMS || !norm.w.data || norm.bias.data || norm.post_w.data || norm.residual.data || norm.x.rows != PK_ROWS_T) return false;
        a.norm = reinterpret_cast<const float *>(norm.w.data);
        a.residual = reinterpret_cast<float *>(norm.x.data);
        a.normed = reinterpret_cast<bf16 *>(norm.out.data);
        a.eps = norm.eps;
        a.m = static_cast<int32_t>(norm.x.cols);
        a.rows_symbol = norm.x.rows;
        ++next;
        if (!is(PK_OP_MATMUL)) return false;
        const auto &router = records[next].as<pk_op_matmul>();
        if (router.n_w != 1 || router.act != PK_ACT_NONE || router.softcap > 0.0f || router.add.data || router.y.format != PK_F32 || !same(router.x, norm.out) || !plain(router.w[0], PK_BF16)) return false;
        a.router = weight(router.w[0]);
        a.router_bias = reinterpret_cast<const float *>(router.bias[0].data);
        a.router_scale = router.scale;
        a.logits = reinterpret_cast<float *>(router.y.data);
        ++next;
        if (!is(PK_OP_ROUTE)) return false;
        const auto &route = records[next].as<pk_op_route>();
        if (route.n_groups > 1 || route.logits.data != router.y.data || route.ids.cols > 32 || route.logits.cols > 32 * kMostPerLane) return false;
        a.choice.bias = reinterpret_cast<const float *>(route.bias.data);
        a.choice.logits = a.logits;
        a.ids = reinterpret_cast<int32_t *>(route.ids.data);
        a.weights = reinterpret_cast<float *>(route.weights.data);
        a.n_experts = a.choice.n_experts = static_cast<int32_t>(route.logits.cols);
        a.n_used = a.choice.n_used = static_cast<int32_t>(route.ids.cols);
        a.choice.score = route.score;
        a.choice.is_normalised = route.is_normalised;
        a.choice.scale = route.scale;
        ++next;
        return true;
    }

    bool experts() {
        MixtureArguments &a = out->arguments;
        if (!is(PK_OP_EXPERTS)) return false;
        const auto &op = records[next].as<pk_op_experts>();
        const Packed *up = find_packed(l.ctx, op.up);
        if (up == nullptr || (up->format != PK_FP8_E4M3 && up->format != PK_BF16) || !op.gate.data || !plain(op.gate, up->format) || !plain(op.up, up->format) || !plain(op.down, up->format)) return false;
        if (op.gate_bias.data || op.up_bias.data || op.down_bias.data || op.act == PK_ACT_RELU2 || op.n_experts != a.n_experts) return false;
        const uint64_t residual = reinterpret_cast<uint64_t>(a.residual);
        if (op.x.data != reinterpret_cast<uint64_t>(a.normed) || op.ids.data != reinterpret_cast<uint64_t>(a.ids) || op.weights.data != reinterpret_cast<uint64_t>(a.weights) || op.y.data != residual || op.add.data != residual) return false;
        const int32_t unit = up->format == PK_BF16 ? 64 : 128;
        if (a.m > kMostNormed || a.m % 128 || op.up.rows % 128 || up->cols != a.m) return false;
        if (a.before.data != nullptr && (!plain(records[out->first].as<pk_op_matmul>().w[0], up->format) || a.before_k % unit)) return false;
        out->format = up->format;
        a.gate = weight(op.gate);
        a.up = weight(op.up);
        a.down = weight(op.down);
        a.f = static_cast<int32_t>(op.up.rows);
        a.act = op.act;
        a.limit = op.limit;
        a.alpha = op.alpha;
        a.experts_scale = op.scale;
        // The fewest rounds of units and of tasks of 16 rows.
        const int64_t tasks = int64_t{a.f} / 16 * a.n_used, units = a.m / unit;
        int64_t least = INT64_MAX;
        for (int32_t n : {16, 8, 4, 2, 1}) {
            if (units % n) continue;
            const int64_t teams = int64_t{l.ctx->n_processors} * (kBlockWarps / n), rounds = units / n * ((tasks + teams - 1) / teams);
            if (rounds <= least) {  // of equals, fewer warps a task
                least = rounds;
                a.warps_k = n;
            }
        }
        ++next;
        return true;
    }

    // The shared expert, when all of it is for this kernel; otherwise the mixture ends before it.
    void shared_expert() {
        MixtureArguments a = out->arguments;
        const int64_t begin = next;
        auto is_ours = [&] {
            if (!is(PK_OP_MATMUL)) return false;
            const auto &in = records[next].as<pk_op_matmul>();
            if (in.n_w != 2 || in.act != a.act || in.act == PK_ACT_NONE || in.softcap > 0.0f || in.scale != 1.0f || in.add.data || in.bias[0].data || in.bias[1].data || in.y.format != PK_BF16) return false;
            if (in.x.data != reinterpret_cast<uint64_t>(a.normed) || !plain(in.w[0], out->format) || !plain(in.w[1], out->format) || in.w[0].rows % 128) return false;
            a.shared_gate = weight(in.w[0]);
            a.shared_up = weight(in.w[1]);
            a.f_shared = static_cast<int32_t>(in.w[0].rows);
            ++next;
            if (next + 1 < records.n() && is(PK_OP_MATMUL) && records[next + 1].op == PK_OP_SIGMOID) {
                const auto &own = records[next].as<pk_op_matmul>();
                const auto &sigmoid = records[next + 1].as<pk_op_sigmoid>();
                if (own.n_w != 1 || own.w[0].rows != 1 || own.x.data != in.x.data || own.bias[0].data || own.add.data || own.softcap > 0.0f || own.act != PK_ACT_NONE || !plain(own.w[0], PK_BF16)) return false;
                if (sigmoid.x.data != in.y.data || sigmoid.out.data != in.y.data || sigmoid.g.data != own.y.data) return false;
                a.switching = weight(own.w[0]);
                a.switch_scale = own.scale;
                next += 2;
            }
            if (!is(PK_OP_MATMUL)) return false;
            const auto &end = records[next].as<pk_op_matmul>();
            if (end.n_w != 1 || end.act != PK_ACT_NONE || end.softcap > 0.0f || end.bias[0].data || end.x.data != in.y.data || !plain(end.w[0], out->format)) return false;
            if (end.y.data != reinterpret_cast<uint64_t>(a.residual) || end.add.data != end.y.data || end.w[0].rows != a.m) return false;
            a.shared_down = weight(end.w[0]);
            a.shared_scale = end.scale;
            ++next;
            return true;
        };
        if (is_ours()) out->arguments = a;
        else next = begin;
    }
};

}  // namespace

std::vector<Mixture> find_mixtures(const Launch &l, const Records &records) {
    std::vector<Mixture> found;
    for (int64_t i = 0; i < records.n(); ++i) {
        Mixture m;
        m.first = i;
        Reader reader = {l, records, &m, i};
        reader.product_before();
        if (!reader.norm_and_router() || !reader.experts()) continue;
        reader.shared_expert();
        m.last = reader.next;
        if (mixture_shared_bytes(m.arguments) > 200 * 1024 || m.arguments.before_k > kMostRow || int64_t{m.arguments.n_used} * m.arguments.f + m.arguments.f_shared > kMostRow) continue;
        found.push_back(m);
        i = m.last - 1;
    }
    return found;
}

}  // namespace pk
