// Tokens of PTX text. A word keeps its dots and double colons, so `ld.global.f32`, `%tid.x`,
// `.reg` and `mbarrier::complete_tx::bytes` are one token each.
#pragma once
#include <cstdint>
#include <string_view>

namespace tw::vgpu::ptx {

struct Token {
  enum class Kind : uint8_t { word, integer, real, string, punctuation, end };
  Kind kind = Kind::end;
  std::string_view text;  // of a string: without the quotes
  int line = 1;           // 1-based
  uint64_t bits = 0;      // integer: the value; real: the bits of a float or a double
  bool single = false;    // real: `bits` are those of a float (0f literals)
  bool is(char c) const { return kind == Kind::punctuation && text[0] == c; }
  bool is(std::string_view word) const { return kind == Kind::word && text == word; }
};

// Reads one token at a time; the text must outlive the lexer. Throws SyntaxError.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}
  Token next();

 private:
  void skip_blanks();
  Token number();
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : 0; }

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace tw::vgpu::ptx
