// printf's formatting into a string, for the tables of reports; cut off after 199 characters.
#pragma once

#include <cstdio>
#include <string>

namespace tessera {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[200];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

}  // namespace tessera
