// The causal audit: two sequences that differ in one token at p must leave the same residual, bit
// for bit, at every position before p, after every block. A verdict counts only beside a positive
// control: faults of known kinds, injected into the same model, must each be found in the very
// layer they are in. Rules and their reasons: docs/audit.md.
//
// All blocks are walked once, each with all sequences: a rank holds its share of the sequences and
// the parameters of one block. What it finds depends on neither ranks nor threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/audit_faults.h"
#include "layers/stack.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

namespace tessera {

// A difference above it is a leak; a smaller one is if it grows with the change that caused it.
constexpr double kAuditThreshold = 1e-6;

struct AuditSubject {
  // Its length is replaced by the audit's: no parameter depends on it. Nothing is dropped of what
  // experts are chosen for, for the audit's length isn't that which capacity is meant for.
  ModelConfig model;
  // The mixer of a layer; may be called more than once for each.
  std::function<std::unique_ptr<Layer>(const ModelConfig& model, std::int64_t layer)> mixer;
  // Fills a unit's parameters (full names, f32), in any order of units and more than once for each.
  std::function<void(std::span<const ParameterSpec> parameters, std::span<const View> values)>
      parameters;
  // Fills a layer's selection bias [N], for those that have one; empty: zeros.
  std::function<void(std::int64_t layer, const View& bias)> selection_bias;
};

// The model itself with the parameters that its inits draw from `seed`.
AuditSubject initialised_subject(const ModelConfig& model, std::uint64_t seed, Device& device);

struct AuditOptions {
  std::int64_t length = 0;  // 0: by the rule
  std::uint64_t seed = 0;   // of tokens and positions
};

// A size that layers report, and the types of mixers that do.
struct AuditSize {
  std::string name;
  std::int64_t positions = 0;
  std::vector<std::string> mixers;
  // The audit's length must be above it. Not so a tile, which is only a way to cut the work, or a
  // window that no sequence of the model is longer than.
  bool counts = true;
};

// Where the audit looks, by the rule from what the layers say of themselves.
struct AuditPlan {
  std::vector<AuditSize> sizes;           // largest first, each (name, positions) once
  std::int64_t length = 0;                // T
  std::vector<std::int64_t> positions;    // p, ascending: every later position may change
  std::vector<std::int64_t> starts;       // of documents, the first 0
  std::vector<std::int64_t> in_document;  // p, ascending: those to the end of its document may
};
// `model_length`: the longest sequence of the model; 0: not known. Throws Error(kUsage) when the
// length that the options ask for isn't above every size that counts.
AuditPlan plan_audit(const std::vector<AuditSize>& sizes, std::int64_t model_length,
                     const AuditOptions& options);

// The largest difference where there must be none, and where it was.
struct AuditDelta {
  double largest = 0.0;
  std::int64_t changed = -1;   // p
  std::int64_t position = -1;  // the first that differs, for this p
};

struct AuditLayer {
  std::string mixer;
  AuditDelta time;      // positions before p, one document
  AuditDelta document;  // positions before p and in other documents than p's
};

struct AuditInjection {
  AuditFault fault = AuditFault::kShift;
  std::int64_t layer = 0;
  double largest = 0.0;     // difference after that layer
  std::int64_t onset = -1;  // the first layer above the threshold; -1: none
  bool localised() const { return onset == layer; }
};

struct AuditOnset {
  std::int64_t layer = 0;
  bool across_documents = false;  // else across time
  AuditDelta delta;
};

// How the difference grows when the embedding at p moves by eps of the way to another token's.
struct AuditSweep {
  std::int64_t layer = 0, changed = 0;
  bool across_documents = false;
  std::vector<double> epsilon, delta;
  double slope = 0.0;  // of log delta in log epsilon; 0 when fewer than two differences are above 0
  // A difference that flows from the change has slope 1 or 2, or is lost in rounding while the
  // change is small; noise comes with any change.
  bool grows() const;
};
constexpr double kAuditSlope = 0.5;

enum class AuditVerdict : std::uint8_t {
  kClean,
  kLeak,
  kInconclusive,  // nothing was found, but the control shows that something could have been missed
};
const char* name_of(AuditVerdict verdict);  // "clean", "leak", "inconclusive"

struct AuditResult {
  AuditPlan plan;
  std::vector<AuditLayer> layers;
  std::vector<AuditInjection> control;
  std::int64_t localised = 0;
  std::optional<AuditOnset> onset;  // of a leak
  std::optional<AuditSweep> sweep;  // if any difference was above 0
  AuditVerdict verdict = AuditVerdict::kInconclusive;
};

// Collective; the same result on all ranks. `progress` (may be empty) is told each layer before it
// is walked. Throws Error(kUsage) when the model can't be audited, Error(kNumerics) when it isn't
// finite, AgreedError for what one rank met.
AuditResult audit(const AuditSubject& subject, const AuditOptions& options, Device& device,
                  Communicator& communicator,
                  const std::function<void(std::int64_t layer)>& progress = {});

}  // namespace tessera
