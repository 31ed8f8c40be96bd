// Matrix products: checks, scratch, and how a product of few rows is cut into panels and blocks of rows for the pool.
#include "matmul.h"

#include "../../host/format.h"
#include "matmul_few_amx.h"
#include "matmul_parts.h"

namespace pk {
namespace {

using Long = long long;

// More rows are done in turns: scratch for activations stays bounded, and a decoded panel has served enough rows.
constexpr int64_t kMaxRowsAtOnce = 512;

// Scratch of the activations in each form.
struct Forms {
    bool coded = false, plain = false;
    int64_t coded_bytes = 0, plain_bytes = 0;
};

Forms forms_of(const MatmulKernels &kernels, const pk_op_matmul &op, int64_t n_rows) {
    Forms forms;
    for (int32_t i = 0; i < op.n_w; ++i) (find_layout(op.w[i].format)->scale != Scale::kNone ? forms.coded : forms.plain) = true;
    int64_t rows = round_up(n_rows, kernels.max_block);
    if (forms.coded) forms.coded_bytes = rows * ((op.x.cols + kGroup - 1) / kGroup) * static_cast<int64_t>(sizeof(CodedX));
    if (forms.plain) forms.plain_bytes = round_up(rows * round_up(op.x.cols, 2) * 4, 64);
    return forms;
}

struct BlockProduct {
    const Parts &parts;
    const MatmulKernels &kernels;
    int64_t n_rows, n_blocks;
    const CodedX *coded;
    const float *plain;

    int64_t row_of(int64_t block) const { return block * kernels.max_block; }
    int64_t rows_in(int64_t block) const {
        int64_t left = n_rows - row_of(block);
        return left < kernels.max_block ? left : kernels.max_block;
    }

    void run_panel(int32_t w, int64_t panel, int64_t block, float *sums) const {
        int32_t rows = kernels.block_rows(rows_in(block));
        const PanelShape &shape = parts.shapes[w];
        const void *x = parts.layouts[w]->scale != Scale::kNone ? static_cast<const void *>(coded + row_of(block) * shape.n_groups)
                                                                 : static_cast<const void *>(plain + row_of(block) * round_up(shape.k, 2));
        kernels.panel(parts.op.w[w].format, rows)(parts.data(w, panel), shape, x, sums);
    }

    // Blocks [begin, end) of the panel with that number.
    void run(int64_t number, int64_t begin, int64_t end) const {
        Parts::Place place = parts.place(number);
        Finish finish = parts.finish(place);
        alignas(64) float sums[2][8 * kPanelRows];
        for (int64_t b = begin; b < end; ++b) {
            run_panel(place.w, place.panel, b, sums[0]);
            if (parts.is_gated()) run_panel(1, place.panel, b, sums[1]);
            kernels.finish(finish, row_of(b), rows_in(b), sums[0], parts.is_gated() ? sums[1] : nullptr, kPanelRows);
        }
    }
};

void matmul_blocks(Context &context, const Parts &parts, int64_t n_rows, void *workspace) {
    const pk_op_matmul &op = parts.op;
    const MatmulKernels &kernels = matmul_kernels_of(context);
    Forms forms = forms_of(kernels, op, n_rows);
    auto *coded = static_cast<CodedX *>(workspace);
    auto *plain = reinterpret_cast<float *>(static_cast<char *>(workspace) + forms.coded_bytes);
    BlockProduct product{parts, kernels, n_rows, (n_rows + kernels.max_block - 1) / kernels.max_block, coded, plain};
    int64_t cols = op.x.cols, n_groups = (cols + kGroup - 1) / kGroup;
    context.pool.parallel_for(product.n_blocks, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t b = begin; b < end; ++b) {
            int64_t row = product.row_of(b), rows = product.rows_in(b), block_rows = kernels.block_rows(rows);
            const float *x = reinterpret_cast<const float *>(op.x.data + row * op.x.stride);
            if (forms.coded) kernels.pack_coded(x, op.x.stride / 4, cols, rows, block_rows, coded + row * n_groups);
            if (forms.plain) kernels.pack_plain(x, op.x.stride / 4, cols, rows, block_rows, plain + row * round_up(cols, 2));
        }
    });
    int64_t n_numbers = parts.n_numbers(), n_parts = (4 * context.pool.n_threads() + n_numbers - 1) / n_numbers;
    if (n_parts > product.n_blocks) n_parts = product.n_blocks;
    context.pool.parallel_for(n_numbers * n_parts, context.pool.grain(n_numbers * n_parts, 8), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t part = i % n_parts;
            product.run(i / n_parts, part * product.n_blocks / n_parts, (part + 1) * product.n_blocks / n_parts);
        }
    });
}

}  // namespace

const MatmulKernels &matmul_kernels_of(const Context &context) {
    switch (context.isa) {
        case Isa::kAmx: return matmul_kernels_amx();
        case Isa::kAvx512: return matmul_kernels_avx512();
        default: return matmul_kernels_avx2();
    }
}

const MatmulKernels &matmul_kernels_amx() {
    static const MatmulKernels kernels = [] {
        MatmulKernels few = matmul_kernels_avx512();
        few.block_rows = [](int64_t n_rows) { return static_cast<int32_t>(n_rows <= 4 ? n_rows : 8); };
        few.panel = [](int32_t format, int32_t rows) {
            PanelKernel kernel = rows == 8 ? few_panel_amx(format) : nullptr;
            return kernel ? kernel : matmul_kernels_avx512().panel(format, rows);
        };
        few.pack_coded = [](const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, void *out) {
            if (block_rows == 8)
                pack_few_amx(x, stride, cols, n_rows, out);
            else
                matmul_kernels_avx512().pack_coded(x, stride, cols, n_rows, block_rows, out);
        };
        return few;
    }();
    return kernels;
}

Parts::Parts(const pk_op_matmul &record) : op(record) {
    for (int32_t i = 0; i < op.n_w; ++i) {
        layouts[i] = find_layout(op.w[i].format);
        shapes[i] = panel_shape(*layouts[i], op.w[i].cols);
        bool counts = i == 0 || !is_gated();
        first_panel[i + 1] = first_panel[i] + (counts ? n_panels(op.w[i].rows) : 0);
        if (i > 0) first_column[i] = first_column[i - 1] + op.w[i - 1].rows;
    }
}

Parts::Place Parts::place(int64_t number) const {
    int32_t w = 0;
    while (number >= first_panel[w + 1]) ++w;
    return {w, number - first_panel[w]};
}

Finish Parts::finish(Place at) const {
    int64_t row = at.panel * kPanelRows, left = op.w[at.w].rows - row;
    auto bias = [&](int32_t w) { return op.bias[w].data ? reinterpret_cast<const float *>(op.bias[w].data) + row : nullptr; };
    return {&op, {bias(at.w), is_gated() ? bias(1) : nullptr}, first_column[at.w] + row, left < kPanelRows ? left : kPanelRows};
}

int32_t matmul_check(const Context &, const pk_op_matmul &op, int64_t op_index) {
    for (int32_t i = 0; i < op.n_w; ++i) {
        if (!is_packed_format(op.w[i].format))
            return fail(PK_UNSUPPORTED, "op %lld (matmul): the cpu pack has no kernel for w[%d] in format %s", (Long)op_index, i, format_name(op.w[i].format));
        if (op.w[i].data % 64) return fail(PK_BAD_ARG, "op %lld (matmul): w[%d] at %#llx is not aligned to 64 bytes", (Long)op_index, i, (unsigned long long)op.w[i].data);
    }
    return PK_OK;
}

int64_t matmul_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows) {
    if (n_rows > kMaxRowsAtOnce) n_rows = kMaxRowsAtOnce;
    Forms forms = forms_of(matmul_kernels_of(context), op, n_rows);
    int64_t blocks = forms.coded_bytes + forms.plain_bytes;
    int64_t tiles = uses_tiles(context, op, n_rows) ? tiles_workspace_bytes(context, op, n_rows) : 0;
    return blocks > tiles ? blocks : tiles;
}

void matmul(Context &context, const pk_op_matmul &op, int64_t n_rows, void *workspace) {
    pk_op_matmul part = op;
    for (int64_t row = 0; row < n_rows; row += kMaxRowsAtOnce) {
        int64_t n = n_rows - row < kMaxRowsAtOnce ? n_rows - row : kMaxRowsAtOnce;
        part.x.data = op.x.data + row * op.x.stride;
        part.y.data = op.y.data + row * op.y.stride;
        if (op.add.data) part.add.data = op.add.data + row * op.add.stride;
        Parts parts(part);
        if (uses_tiles(context, part, n))
            matmul_tiles(context, parts, n, workspace);
        else
            matmul_blocks(context, parts, n, workspace);
    }
}

}  // namespace pk
