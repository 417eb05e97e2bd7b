// A profile as a table, JSON, CSV and a figure.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "launch/format.h"
#include "launch/profile.h"

namespace tessera {
namespace {

// Distinct, in the order of the lines.
std::vector<std::string> mixers_of(const std::vector<ProfileLine>& lines) {
  std::vector<std::string> mixers;
  for (const ProfileLine& line : lines) {
    if (mixers.empty() || mixers.back() != line.mixer) mixers.push_back(line.mixer);
  }
  return mixers;
}
std::vector<std::int64_t> lengths_of(const std::vector<ProfileLine>& lines) {
  std::vector<std::int64_t> lengths;
  for (const ProfileLine& line : lines) {
    if (line.mixer == lines.front().mixer) lengths.push_back(line.length);
  }
  return lengths;
}

const ProfileLine* find(const std::vector<ProfileLine>& lines, const std::string& mixer,
                        std::int64_t length) {
  for (const ProfileLine& line : lines) {
    if (line.mixer == mixer && line.length == length) return &line;
  }
  return nullptr;
}

using Figure = std::function<double(const ProfileLine&)>;

// As a multiple of full's at the same length; 0 where full wasn't measured.
double ratio(const std::vector<ProfileLine>& lines, const ProfileLine& line, const Figure& figure) {
  const ProfileLine* const full = find(lines, "full", line.length);
  return full == nullptr ? 0.0 : figure(line) / figure(*full);
}

// Between the last two lengths; 0 with one length.
double slope(const std::vector<ProfileLine>& lines, const std::string& mixer,
             const Figure& figure) {
  const std::vector<std::int64_t> lengths = lengths_of(lines);
  if (lengths.size() < 2) return 0.0;
  const std::int64_t a = lengths[lengths.size() - 2], b = lengths.back();
  return log_slope(figure(*find(lines, mixer, a)), figure(*find(lines, mixer, b)), a, b);
}

std::string table(const std::vector<ProfileLine>& lines, const std::string& title,
                  const char* pattern, const Figure& figure, bool paper) {
  std::string text = title + "\n" + format("  %-13s", "");
  for (const std::int64_t length : lengths_of(lines)) {
    text += format("%*s", paper ? 28 : 20, ("T = " + std::to_string(length)).c_str());
  }
  text += format("%10s\n", lengths_of(lines).size() > 1 ? "slope" : "");
  for (const std::string& mixer : mixers_of(lines)) {
    text += format("  %-13s", mixer.c_str());
    for (const std::int64_t length : lengths_of(lines)) {
      const ProfileLine& line = *find(lines, mixer, length);
      const double times = ratio(lines, line, figure);
      text +=
          format(pattern, figure(line)) + (times > 0.0 ? format(" %7.2fx", times) : "         ");
      if (!paper) continue;
      const double theirs = paper_ratio(mixer, length);
      text += theirs > 0.0 ? format("(%5.2fx)", theirs) : "        ";
    }
    if (lengths_of(lines).size() > 1) text += format("%10.2f", slope(lines, mixer, figure));
    text += "\n";
  }
  return text;
}

double forward_ms(const ProfileLine& line) { return line.forward.seconds * 1e3; }
double both_ms(const ProfileLine& line) { return line.both.seconds * 1e3; }
double mebibytes(std::int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(1 << 20);
}

nlohmann::ordered_json cost_json(const ProfileCost& cost, double times) {
  nlohmann::ordered_json json = {{"seconds", cost.seconds},
                                 {"least", cost.least},
                                 {"most", cost.most},
                                 {"booked_bytes", cost.booked_bytes}};
  json["measured_bytes"] = cost.measured_bytes < 0 ? nlohmann::ordered_json()
                                                   : nlohmann::ordered_json(cost.measured_bytes);
  json["times_full"] = times > 0.0 ? nlohmann::ordered_json(times) : nlohmann::ordered_json();
  return json;
}

}  // namespace

std::string profile_table(const ProfileSubject& subject, const std::vector<ProfileLine>& lines) {
  std::string text = subject.config + ": one mixer alone, width " + std::to_string(subject.width) +
                     ", " + std::to_string(subject.sequences) + " x T tokens, " +
                     (subject.bf16 ? "bf16" : "f32") + ", " + subject.device + "; medians of " +
                     std::to_string(subject.repeats) +
                     "\nBeside each figure: times full's, and in brackets what the paper has.\n\n";
  text += table(lines, "Forward, ms", "%11.2f", forward_ms, true);
  if (subject.backward)
    text += "\n" + table(lines, "Forward and backward, ms", "%11.2f", both_ms, false);
  text += "\n" + table(
                     lines, "Memory of the forward pass, MiB booked", "%11.1f",
                     [](const ProfileLine& line) { return mebibytes(line.forward.booked_bytes); },
                     false);
  if (!subject.backward) return text;
  text +=
      "\n" + table(
                 lines, "Memory of forward and backward, MiB booked", "%11.1f",
                 [](const ProfileLine& line) { return mebibytes(line.both.booked_bytes); }, false);
  const bool measured = std::all_of(lines.begin(), lines.end(), [](const ProfileLine& line) {
    return line.both.measured_bytes > 0;
  });
  if (!measured) return text;
  return text + "\n" +
         table(
             lines, "Memory of forward and backward, MiB that the process grew by at its largest",
             "%11.1f", [](const ProfileLine& line) { return mebibytes(line.both.measured_bytes); },
             false);
}

nlohmann::ordered_json profile_json(const ProfileSubject& subject,
                                    const std::vector<ProfileLine>& lines) {
  nlohmann::ordered_json json = {{"config", subject.config},
                                 {"device", subject.device},
                                 {"precision", subject.bf16 ? "bf16" : "f32"},
                                 {"width", subject.width},
                                 {"sequences", subject.sequences},
                                 {"repeats", subject.repeats},
                                 {"lines", nlohmann::ordered_json::array()},
                                 {"slopes", nlohmann::ordered_json::object()}};
  for (const ProfileLine& line : lines) {
    nlohmann::ordered_json entry = {{"mixer", line.mixer}, {"length", line.length}};
    entry["forward"] = cost_json(line.forward, ratio(lines, line, forward_ms));
    if (subject.backward) {
      entry["forward_backward"] = cost_json(line.both, ratio(lines, line, both_ms));
    }
    const double paper = paper_ratio(line.mixer, line.length);
    entry["paper_times_full"] =
        paper > 0.0 ? nlohmann::ordered_json(paper) : nlohmann::ordered_json();
    json["lines"].push_back(std::move(entry));
  }
  if (lengths_of(lines).size() < 2) return json;
  for (const std::string& mixer : mixers_of(lines)) {
    json["slopes"][mixer]["forward"] = slope(lines, mixer, forward_ms);
    if (subject.backward) json["slopes"][mixer]["forward_backward"] = slope(lines, mixer, both_ms);
  }
  return json;
}

std::string profile_csv(const std::vector<ProfileLine>& lines) {
  std::string text =
      "mixer,length,pass,seconds_median,seconds_least,seconds_most,booked_bytes,measured_bytes\n";
  for (const ProfileLine& line : lines) {
    const auto row = [&](const char* pass, const ProfileCost& cost) {
      text += line.mixer + "," + std::to_string(line.length) + "," + pass + "," +
              format("%.9g,%.9g,%.9g,", cost.seconds, cost.least, cost.most) +
              std::to_string(cost.booked_bytes) + "," +
              (cost.measured_bytes < 0 ? "" : std::to_string(cost.measured_bytes)) + "\n";
    };
    row("forward", line.forward);
    if (line.both.booked_bytes > 0) row("forward_backward", line.both);
  }
  return text;
}

std::string profile_svg(const ProfileSubject& subject, const std::vector<ProfileLine>& lines) {
  constexpr double kWidth = 760, kHeight = 440, kLeft = 70, kRight = 150, kTop = 34, kBottom = 46;
  constexpr std::array kColours = {"#24292f", "#1f6feb", "#d1242f", "#1a7f37",
                                   "#8250df", "#bf8700", "#0a7ea4", "#cf57a4"};
  const std::vector<std::int64_t> lengths = lengths_of(lines);
  double low = 1e300, high = 0.0;
  for (const ProfileLine& line : lines) {
    low = std::min(low, line.forward.seconds);
    high = std::max({high, line.forward.seconds, line.both.seconds});
  }
  const double bottom = std::floor(std::log10(low)), top = std::ceil(std::log10(high));
  const double first = std::log2(static_cast<double>(lengths.front()));
  const double last = std::max(std::log2(static_cast<double>(lengths.back())), first + 1);
  const auto x = [&](std::int64_t length) {
    return kLeft + (kWidth - kLeft - kRight) * (std::log2(static_cast<double>(length)) - first) /
                       (last - first);
  };
  const auto y = [&](double seconds) {
    return kTop +
           (kHeight - kTop - kBottom) * (top - std::log10(seconds)) / std::max(top - bottom, 1.0);
  };
  std::string svg = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#24292f\">\n",
      kWidth, kHeight, kWidth, kHeight);
  svg += format("<rect width=\"%g\" height=\"%g\" fill=\"#ffffff\"/>\n", kWidth, kHeight);
  svg += format("<text x=\"%g\" y=\"20\" font-size=\"14\">", kLeft) +
         format("One mixer alone, width %lld, %s: ", static_cast<long long>(subject.width),
                subject.bf16 ? "bf16" : "f32") +
         (subject.backward ? "forward, and (dashed) with its backward" : "forward") + "</text>\n";
  for (int power = static_cast<int>(bottom); power <= static_cast<int>(top); ++power) {
    const double at = y(std::pow(10.0, power));
    svg += format("<path d=\"M%g %.1fH%g\" stroke=\"#d8dee4\"/>", kLeft, at, kWidth - kRight);
    svg += format("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g ms</text>\n", kLeft - 8, at + 4,
                  std::pow(10.0, power + 3.0));
  }
  for (const std::int64_t length : lengths) {
    svg += format("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%lld</text>\n", x(length),
                  kHeight - kBottom + 18, static_cast<long long>(length));
  }
  svg += format("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">positions</text>\n",
                (kLeft + kWidth - kRight) / 2, kHeight - 8);
  const std::vector<std::string> mixers = mixers_of(lines);
  for (std::size_t i = 0; i < mixers.size(); ++i) {
    const char* const colour = kColours[i % kColours.size()];
    const auto curve = [&](const Figure& seconds, const char* dashes) {
      std::string points;
      for (const std::int64_t length : lengths) {
        points += format("%.1f,%.1f ", x(length), y(seconds(*find(lines, mixers[i], length))));
      }
      svg += "<polyline points=\"" + points +
             format("\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"%s/>\n", colour, dashes);
    };
    curve([](const ProfileLine& line) { return line.forward.seconds; }, "");
    if (subject.backward) {
      curve([](const ProfileLine& line) { return line.both.seconds; }, " stroke-dasharray=\"6 4\"");
    }
    const double at = kTop + 16 + 18 * static_cast<double>(i);
    svg += format("<path d=\"M%g %gh24\" stroke=\"%s\" stroke-width=\"2\"/>", kWidth - kRight + 14,
                  at - 4, colour);
    svg +=
        format("<text x=\"%g\" y=\"%g\">%s</text>\n", kWidth - kRight + 44, at, mixers[i].c_str());
  }
  return svg + "</svg>\n";
}

}  // namespace tessera
