// What the probe found as tables, JSON and charts.
#include <algorithm>
#include <cmath>
#include <limits>

#include "launch/format.h"
#include "launch/probe.h"

namespace tessera {
namespace {

using Long = long long;  // what %lld takes

std::string heading(const ProbeContext& context) {
  return context.checkpoint + format(", step %lld: ", static_cast<Long>(context.step)) +
         format("%lld tokens in %lld windows of %lld, from ", static_cast<Long>(context.tokens),
                static_cast<Long>(context.windows), static_cast<Long>(context.length)) +
         context.source + "\n";
}

nlohmann::ordered_json context_json(const ProbeContext& context) {
  return {
      {"config", context.config},   {"checkpoint", context.checkpoint}, {"step", context.step},
      {"width", context.width},     {"length", context.length},         {"source", context.source},
      {"windows", context.windows}, {"tokens", context.tokens},         {"seed", context.seed}};
}

nlohmann::ordered_json spread_json(const RankSpread& spread) {
  return {{"mean", spread.mean}, {"least", spread.least}, {"most", spread.most}};
}

// One curve over the blocks; `low` and `high` are the ends of its bars.
struct Curve {
  std::string name;
  const char* colour;
  std::vector<double> values, low, high;
  double band_low = 0.0, band_high = 0.0;  // of what is published; equal: nothing is
};

// Blocks side by side, labelled by their layers; values from `bottom` to `top` in `steps` steps.
struct Chart {
  std::string title, axis;
  std::vector<std::int64_t> layers;
  double bottom = 0.0, top = 1.0;
  int steps = 5;
  std::vector<Curve> curves;
};

std::string svg_of(const Chart& chart) {
  constexpr double kWidth = 760, kHeight = 400, kLeft = 60, kRight = 190, kTop = 40, kBottom = 50;
  const auto count = static_cast<double>(chart.layers.size());
  const auto x = [&](std::size_t block) {
    return kLeft + (kWidth - kLeft - kRight) * (static_cast<double>(block) + 0.5) / count;
  };
  const auto y = [&](double value) {
    return kTop + (kHeight - kTop - kBottom) * (chart.top - value) / (chart.top - chart.bottom);
  };
  std::string svg = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#24292f\">\n",
      kWidth, kHeight, kWidth, kHeight);
  svg += format("<rect width=\"%g\" height=\"%g\" fill=\"#ffffff\"/>\n", kWidth, kHeight);
  svg += format("<text x=\"%g\" y=\"22\" font-size=\"14\">", kLeft) + chart.title + "</text>\n";
  for (const Curve& curve : chart.curves) {
    if (curve.band_low == curve.band_high) continue;
    svg += format(
        "<rect x=\"%g\" y=\"%.1f\" width=\"%g\" height=\"%.1f\" fill=\"%s\" opacity=\"0.15\"/>\n",
        kLeft, y(curve.band_high), kWidth - kLeft - kRight, y(curve.band_low) - y(curve.band_high),
        curve.colour);
  }
  for (int step = 0; step <= chart.steps; ++step) {
    const double value = chart.bottom + (chart.top - chart.bottom) * step / chart.steps;
    svg += format("<path d=\"M%g %.1fH%g\" stroke=\"#d8dee4\"/>", kLeft, y(value), kWidth - kRight);
    svg += format("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", kLeft - 8,
                  y(value) + 4, value);
  }
  for (std::size_t block = 0; block < chart.layers.size(); ++block) {
    svg += format("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%lld</text>\n", x(block),
                  kHeight - kBottom + 18, static_cast<Long>(chart.layers[block]));
  }
  svg += format("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">layer</text>\n",
                (kLeft + kWidth - kRight) / 2, kHeight - 10);
  svg += format("<text x=\"%g\" y=\"%g\">", kWidth - kRight + 14, kTop) + chart.axis + "</text>\n";
  for (std::size_t i = 0; i < chart.curves.size(); ++i) {
    const Curve& curve = chart.curves[i];
    // Bars of several curves stand beside one another.
    const double shift = 4.0 * (static_cast<double>(i) - 0.5);
    std::string points;
    for (std::size_t block = 0; block < curve.values.size(); ++block) {
      points += format("%.1f,%.1f ", x(block) + shift, y(curve.values[block]));
      svg += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>", x(block) + shift,
                    y(curve.values[block]), curve.colour);
      if (curve.low.empty()) continue;
      svg += format("<path d=\"M%.1f %.1fV%.1f\" stroke=\"%s\"/>\n", x(block) + shift,
                    y(curve.low[block]), y(curve.high[block]), curve.colour);
    }
    svg += "<polyline points=\"" + points +
           format("\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"/>\n", curve.colour);
    const double at = kTop + 22 + 18 * static_cast<double>(i);
    svg += format("<path d=\"M%g %gh24\" stroke=\"%s\" stroke-width=\"2\"/>", kWidth - kRight + 14,
                  at - 4, curve.colour);
    svg += format("<text x=\"%g\" y=\"%g\">", kWidth - kRight + 44, at) + curve.name + "</text>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace

std::string dimension_table(const ProbeContext& context,
                            const std::vector<BlockDimension>& blocks) {
  std::string text = "Intrinsic dimension (TwoNN) of what enters the experts\n" + heading(context);
  text += format("  %5s %12s %10s %10s %8s %11s %6s\n", "layer", "likelihood", "+-", "line fit",
                 "points", "duplicates", "ties");
  for (const BlockDimension& block : blocks) {
    const IntrinsicDimension& found = block.dimension;
    text +=
        format("  %5lld %12.3f %10.3f %10.3f %8lld %11lld %6lld\n", static_cast<Long>(block.layer),
               found.likelihood, found.standard_error, found.line, static_cast<Long>(found.used),
               static_cast<Long>(found.duplicates), static_cast<Long>(found.ties));
  }
  return text;
}

nlohmann::ordered_json dimension_json(const ProbeContext& context,
                                      const std::vector<BlockDimension>& blocks) {
  nlohmann::ordered_json json = context_json(context);
  json["blocks"] = nlohmann::ordered_json::array();
  for (const BlockDimension& block : blocks) {
    const IntrinsicDimension& found = block.dimension;
    json["blocks"].push_back({{"layer", block.layer},
                              {"likelihood", found.likelihood},
                              {"standard_error", found.standard_error},
                              {"line_fit", found.line},
                              {"points", found.points},
                              {"duplicates", found.duplicates},
                              {"ties", found.ties},
                              {"used", found.used}});
  }
  return json;
}

std::string dimension_svg(const ProbeContext& context, const std::vector<BlockDimension>& blocks) {
  Chart chart;
  chart.title = format("Intrinsic dimension of what enters the experts, %lld tokens, step %lld",
                       static_cast<Long>(context.tokens), static_cast<Long>(context.step));
  chart.axis = "TwoNN";
  Curve likelihood = {"likelihood, 2 s.e.", "#1f6feb", {}, {}, {}};
  Curve line = {"line fit", "#bf8700", {}, {}, {}};
  double most = 0.0;
  for (const BlockDimension& block : blocks) {
    const IntrinsicDimension& found = block.dimension;
    chart.layers.push_back(block.layer);
    likelihood.values.push_back(found.likelihood);
    likelihood.low.push_back(found.likelihood - 2 * found.standard_error);
    likelihood.high.push_back(found.likelihood + 2 * found.standard_error);
    line.values.push_back(found.line);
    most = std::max({most, likelihood.high.back(), found.line});
  }
  // The next of 1, 2, 5, 10, 20 ... times the number of steps.
  const double power = std::pow(10.0, std::floor(std::log10(most / chart.steps)));
  for (const double unit : {1.0, 2.0, 5.0, 10.0}) {
    chart.top = unit * power * chart.steps;
    if (chart.top >= most) break;
  }
  chart.curves = {likelihood, line};
  return svg_of(chart);
}

std::string rank_table(const ProbeContext& context, const std::vector<BlockRanks>& blocks,
                       const RankControl& control) {
  const auto spread = [](const RankSpread& ranks) {
    return format("%8.3f (%5.3f - %5.3f)", ranks.mean, ranks.least, ranks.most);
  };
  std::string text = "Ranks of the experts' Jacobians at tokens routed to them\n" +
                     heading(context) +
                     format("  %5s %5s %5s %5s %5s %7s  %-24s  %-24s\n", "layer", "N", "K", "l",
                            "m", "pairs", "  J / q", "  J_mix / l");
  for (const BlockRanks& block : blocks) {
    text += format("  %5lld %5lld %5lld %5lld %5lld %7lld  ", static_cast<Long>(block.layer),
                   static_cast<Long>(block.experts), static_cast<Long>(block.active),
                   static_cast<Long>(block.latent), static_cast<Long>(block.inner),
                   static_cast<Long>(block.pairs)) +
            spread(block.local) + "  " + spread(block.mixture) + "\n";
  }
  text +=
      format("  %-39s %-24s   ", "published",
             format("           %5.3f - %5.3f", kPublishedLocal[0], kPublishedLocal[1]).c_str()) +
      format("          %5.3f - %5.3f\n", kPublishedMixture[0], kPublishedMixture[1]);
  text += "Means, and in brackets the least and the most. ";
  text += format("Control: %lld/%zu known ranks found", static_cast<Long>(control.recovered()),
                 control.cases.size());
  const bool whole = control.recovered() == static_cast<std::int64_t>(control.cases.size());
  return text + (whole ? ".\n" : ": THE RANKS ABOVE CAN'T BE RELIED ON.\n");
}

nlohmann::ordered_json rank_json(const ProbeContext& context, const std::vector<BlockRanks>& blocks,
                                 const RankControl& control) {
  nlohmann::ordered_json json = context_json(context);
  json["threshold"] = kRankThreshold;
  json["control"] = {{"cases", control.cases.size()}, {"recovered", control.recovered()}};
  json["published"] = {{"local", kPublishedLocal}, {"mixture", kPublishedMixture}};
  json["blocks"] = nlohmann::ordered_json::array();
  for (const BlockRanks& block : blocks) {
    json["blocks"].push_back({{"layer", block.layer},
                              {"experts", block.experts},
                              {"active", block.active},
                              {"latent", block.latent},
                              {"inner", block.inner},
                              {"capacity", block.capacity},
                              {"tokens", block.tokens},
                              {"pairs", block.pairs},
                              {"local", spread_json(block.local)},
                              {"mixture", spread_json(block.mixture)}});
  }
  return json;
}

std::string rank_svg(const ProbeContext& context, const std::vector<BlockRanks>& blocks) {
  Chart chart;
  chart.title = format("Ranks of the experts' Jacobians, %lld tokens, step %lld; bands: published",
                       static_cast<Long>(context.tokens), static_cast<Long>(context.step));
  chart.axis = "mean, least to most";
  Curve local = {"J / q", "#1f6feb", {}, {}, {}, kPublishedLocal[0], kPublishedLocal[1]};
  Curve mixture = {"J_mix / l", "#d1242f", {}, {}, {}, kPublishedMixture[0], kPublishedMixture[1]};
  for (const BlockRanks& block : blocks) {
    chart.layers.push_back(block.layer);
    for (const auto& [curve, ranks] :
         {std::pair{&local, block.local}, std::pair{&mixture, block.mixture}}) {
      curve->values.push_back(ranks.mean);
      curve->low.push_back(ranks.least);
      curve->high.push_back(ranks.most);
    }
  }
  chart.curves = {local, mixture};
  return svg_of(chart);
}

}  // namespace tessera
