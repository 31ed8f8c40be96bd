// Checks of the records of rare.h.
#include "../rare.h"
#include "check.h"

namespace pk {
namespace {

class RareChecker : Checks {
   public:
    using Checks::Checks;

    int32_t check() const {
        switch (record_.op) {
            case PK_OP_SOFTPLUS: return softplus(record_.as<pk_op_softplus>());
            case PK_OP_WEIGH: return weigh(record_.as<pk_op_weigh>());
            default: return PK_OK;
        }
    }

   private:
    int32_t softplus(const pk_op_softplus &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("g", op.g)) return status;
        if (int32_t status = same_rows("x", op.x, "g", op.g)) return status;
        if (int32_t status = equal("x width modulo g width", op.x.cols % op.g.cols, "wanted", 0)) return status;
        return like("x", op.x, "out", op.out);
    }

    int32_t weigh(const pk_op_weigh &op) const {
        if (int32_t status = table("ids", op.ids, PK_I32)) return status;
        if (int32_t status = table("weights", op.weights, PK_F32)) return status;
        if (int32_t status = same_rows("ids", op.ids, "weights", op.weights)) return status;
        if (int32_t status = equal("ids width", op.ids.cols, "weights width", op.weights.cols)) return status;
        if (!op.logits.data && !op.scales.data) return fail(PK_BAD_ARG, "op %lld (%s): both logits and scales are absent", (Long)index_, name_);
        if (op.scales.data)
            if (int32_t status = vector("scales", op.scales, op.logits.data ? op.logits.cols : op.scales.cols)) return status;
        if (!op.logits.data) return PK_OK;
        if (int32_t status = table("logits", op.logits, PK_F32)) return status;
        return same_rows("ids", op.ids, "logits", op.logits);
    }
};

}  // namespace

int32_t check_rare(int64_t index, const Record &record, const pk_state &state, const Support &support) {
    return RareChecker(index, record, state, support).check();
}

}  // namespace pk
