// Matrix products: checks, scratch, and how a product is cut into panels and blocks of rows for the pool.
#include "matmul.h"

#include "../../host/format.h"
#include "format/layout.h"
#include "matmul_kernels.h"

namespace pk {
namespace {

using Long = long long;

const MatmulKernels &kernels_of(const Context &context) { return context.isa == Isa::kAvx2 ? matmul_kernels_avx2() : matmul_kernels_avx512(); }

bool is_coded(int32_t format) { return find_layout(format)->scale != Scale::kNone; }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch of the activations in each form, for any number of rows up to n_rows.
struct Forms {
    bool coded = false, plain = false;
    int64_t coded_bytes = 0, plain_bytes = 0;
};

Forms forms_of(const MatmulKernels &kernels, const pk_op_matmul &op, int64_t n_rows) {
    Forms forms;
    for (int32_t i = 0; i < op.n_w; ++i) (is_coded(op.w[i].format) ? forms.coded : forms.plain) = true;
    int64_t rows = round_up(n_rows, kernels.max_block);
    if (forms.coded) forms.coded_bytes = rows * ((op.x.cols + kGroup - 1) / kGroup) * static_cast<int64_t>(sizeof(CodedX));
    if (forms.plain) forms.plain_bytes = round_up(rows * round_up(op.x.cols, 2) * 4, 64);
    return forms;
}

// A product on its way: which panels there are, and where activations lie.
struct Product {
    const pk_op_matmul &op;
    const MatmulKernels &kernels;
    int64_t n_rows, n_blocks;
    const CodedX *coded;
    const float *plain;
    Layout const *layouts[3];
    PanelShape shapes[3];
    int64_t first_panel[4];  // of each weight, counted through

    bool is_gated() const { return op.act != PK_ACT_NONE; }
    int64_t row_of(int64_t block) const { return block * kernels.max_block; }
    int64_t rows_in(int64_t block) const {
        int64_t left = n_rows - row_of(block);
        return left < kernels.max_block ? left : kernels.max_block;
    }

    void run_panel(int32_t w, int64_t panel, int64_t block, float *sums) const {
        int32_t rows = kernels.block_rows(rows_in(block));
        const auto *data = reinterpret_cast<const uint8_t *>(op.w[w].data) + panel * shapes[w].panel_bytes;
        const void *x = layouts[w]->scale != Scale::kNone ? static_cast<const void *>(coded + row_of(block) * shapes[w].n_groups)
                                                           : static_cast<const void *>(plain + row_of(block) * round_up(op.x.cols, 2));
        kernels.panel(op.w[w].format, rows)(data, shapes[w], x, sums);
    }

    // Blocks [begin, end) of the panel with that number, counted through all weights (gated: through the first).
    void run(int64_t number, int64_t begin, int64_t end) const {
        int32_t w = 0;
        while (number >= first_panel[w + 1]) ++w;
        int64_t panel = number - first_panel[w], row = panel * kPanelRows, left = op.w[w].rows - row;
        int64_t before = 0;
        for (int32_t i = 0; i < w; ++i) before += op.w[i].rows;
        Finish finish{&op, {bias(w, row), is_gated() ? bias(1, row) : nullptr}, before + row, left < kPanelRows ? left : kPanelRows};
        alignas(64) float sums[2][8 * kPanelRows];
        for (int64_t b = begin; b < end; ++b) {
            run_panel(w, panel, b, sums[0]);
            if (is_gated()) run_panel(1, panel, b, sums[1]);
            kernels.finish(finish, row_of(b), rows_in(b), sums[0], is_gated() ? sums[1] : nullptr, kPanelRows);
        }
    }

    const float *bias(int32_t w, int64_t row) const { return op.bias[w].data ? reinterpret_cast<const float *>(op.bias[w].data) + row : nullptr; }
};

}  // namespace

int32_t matmul_check(const Context &, const pk_op_matmul &op, int64_t op_index) {
    for (int32_t i = 0; i < op.n_w; ++i) {
        if (!is_packed_format(op.w[i].format))
            return fail(PK_UNSUPPORTED, "op %lld (matmul): the cpu pack has no kernel for w[%d] in format %s", (Long)op_index, i, format_name(op.w[i].format));
        if (op.w[i].data % 64) return fail(PK_BAD_ARG, "op %lld (matmul): w[%d] at %#llx is not aligned to 64 bytes", (Long)op_index, i, (unsigned long long)op.w[i].data);
    }
    return PK_OK;
}

int64_t matmul_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows) {
    Forms forms = forms_of(kernels_of(context), op, n_rows);
    return forms.coded_bytes + forms.plain_bytes;
}

void matmul(Context &context, const pk_op_matmul &op, int64_t n_rows, void *workspace) {
    if (n_rows < 1) return;
    const MatmulKernels &kernels = kernels_of(context);
    Forms forms = forms_of(kernels, op, n_rows);
    auto *coded = static_cast<CodedX *>(workspace);
    auto *plain = reinterpret_cast<float *>(static_cast<char *>(workspace) + forms.coded_bytes);
    Product product{op, kernels, n_rows, (n_rows + kernels.max_block - 1) / kernels.max_block, coded, plain, {}, {}, {}};
    for (int32_t i = 0; i < op.n_w; ++i) {
        product.layouts[i] = find_layout(op.w[i].format);
        product.shapes[i] = panel_shape(*product.layouts[i], op.w[i].cols);
        bool counts = i == 0 || !product.is_gated();
        product.first_panel[i + 1] = product.first_panel[i] + (counts ? n_panels(op.w[i].rows) : 0);
    }
    int64_t cols = op.x.cols, n_groups = (cols + kGroup - 1) / kGroup;
    context.pool.parallel_for(product.n_blocks, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t b = begin; b < end; ++b) {
            int64_t row = product.row_of(b), rows = product.rows_in(b), block_rows = kernels.block_rows(rows);
            const float *x = reinterpret_cast<const float *>(op.x.data + row * op.x.stride);
            if (forms.coded) kernels.pack_coded(x, op.x.stride / 4, cols, rows, block_rows, coded + row * n_groups);
            if (forms.plain) kernels.pack_plain(x, op.x.stride / 4, cols, rows, block_rows, plain + row * round_up(cols, 2));
        }
    });
    int64_t n_numbers = product.first_panel[op.n_w];
    int64_t n_parts = (4 * context.pool.n_threads() + n_numbers - 1) / n_numbers;
    if (n_parts > product.n_blocks) n_parts = product.n_blocks;
    context.pool.parallel_for(n_numbers * n_parts, context.pool.grain(n_numbers * n_parts, 8), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t part = i % n_parts;
            product.run(i / n_parts, part * product.n_blocks / n_parts, (part + 1) * product.n_blocks / n_parts);
        }
    });
}

}  // namespace pk
