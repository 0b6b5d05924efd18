#include "vgpu/lexer.h"

#include <bit>
#include <cctype>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "vgpu/fault.h"

namespace tw::vgpu::ptx {

static bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool starts_word(char c) {
  return is_letter(c) || c == '_' || c == '$' || c == '%' || c == '.';
}
static bool continues_word(char c) {
  return is_letter(c) || is_digit(c) || c == '_' || c == '$' || c == '.';
}

void Lexer::skip_blanks() {
  for (;;) {
    const char c = peek();
    if (c == '\n') {
      ++line_, ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
      ++at_;
    } else if (c == '/' && peek(1) == '/') {
      while (at_ < text_.size() && peek() != '\n') ++at_;
    } else if (c == '/' && peek(1) == '*') {
      const int first = line_;
      at_ += 2;
      while (!(peek() == '*' && peek(1) == '/')) {
        if (at_ >= text_.size()) throw SyntaxError(first, "comment without end");
        if (peek() == '\n') ++line_;
        ++at_;
      }
      at_ += 2;
    } else {
      return;
    }
  }
}

Token Lexer::next() {
  skip_blanks();
  Token token;
  token.line = line_;
  if (at_ >= text_.size()) return token;
  const size_t first = at_;
  const char c = peek();
  if (is_digit(c)) return number();
  if (starts_word(c)) {
    token.kind = Token::Kind::word;
    ++at_;
    for (;;) {
      if (continues_word(peek()))
        ++at_;
      else if (peek() == ':' && peek(1) == ':' && continues_word(peek(2)))
        at_ += 2;
      else
        break;
    }
    token.text = text_.substr(first, at_ - first);
    return token;
  }
  if (c == '"') {
    token.kind = Token::Kind::string;
    for (++at_; peek() != '"'; ++at_) {
      if (at_ >= text_.size() || peek() == '\n') throw SyntaxError(line_, "string without end");
      if (peek() == '\\' && at_ + 1 < text_.size() && peek(1) != '\n') ++at_;
    }
    token.text = text_.substr(first + 1, at_ - first - 1);
    ++at_;
    return token;
  }
  static constexpr std::string_view kPunctuation = "{}[](),;:+-!|@<>=~*/&^?";
  if (kPunctuation.find(c) == std::string_view::npos) {
    const auto code = static_cast<unsigned char>(c);
    throw SyntaxError(line_, code >= 32 && code < 127
                                 ? std::string("unexpected character '") + c + "'"
                                 : "unexpected byte " + std::to_string(code));
  }
  token.kind = Token::Kind::punctuation;
  token.text = text_.substr(at_++, 1);
  return token;
}

// Integers in base 2, 8, 10 and 16 with an optional U; reals as decimal (double) or as 0f / 0d and
// the hexadecimal bits.
Token Lexer::number() {
  Token token;
  token.line = line_;
  const size_t first = at_;
  const auto fail = [&](const char* what) {
    throw SyntaxError(
        line_, std::string(what) + " '" +
                   std::string(text_.substr(first, std::min<size_t>(at_ - first + 1, 40))) + "'");
  };
  const char kind = peek() == '0' ? static_cast<char>(std::tolower(peek(1))) : 0;
  if (kind == 'f' || kind == 'd') {
    const size_t digits = kind == 'f' ? 8 : 16;
    at_ += 2;
    for (size_t i = 0; i < digits; ++i, ++at_) {
      const char c = peek();
      if (!std::isxdigit(static_cast<unsigned char>(c))) fail("too few hexadecimal digits in");
      const int digit = is_digit(c) ? c - '0' : std::tolower(c) - 'a' + 10;
      token.bits = token.bits << 4 | static_cast<uint64_t>(digit);
    }
    token.kind = Token::Kind::real;
    token.single = kind == 'f';
  } else {
    const int base = kind == 'x' ? 16 : kind == 'b' ? 2 : 10;
    if (base != 10) at_ += 2;
    const size_t digits = at_;
    while (base == 16 ? std::isxdigit(static_cast<unsigned char>(peek())) != 0 : is_digit(peek()))
      ++at_;
    const bool fraction = base == 10 && peek() == '.' && is_digit(peek(1));
    const bool exponent = base == 10 && (peek() == 'e' || peek() == 'E');
    if (fraction || exponent) {
      if (fraction)
        for (++at_; is_digit(peek());) ++at_;
      if (peek() == 'e' || peek() == 'E') {
        ++at_;
        if (peek() == '+' || peek() == '-') ++at_;
        if (!is_digit(peek())) fail("exponent without digits in");
        while (is_digit(peek())) ++at_;
      }
      const std::string text(text_.substr(first, at_ - first));
      token.kind = Token::Kind::real;
      token.bits = std::bit_cast<uint64_t>(std::strtod(text.c_str(), nullptr));
    } else {
      std::string text(text_.substr(digits, at_ - digits));
      if (text.empty()) fail("number without digits");
      const bool octal = base == 10 && text.size() > 1 && text[0] == '0';
      const int radix = octal ? 8 : base;
      for (const char c : text)
        if ((radix == 8 && c > '7') || (radix == 2 && c > '1')) fail("wrong digit in");
      errno = 0;
      token.bits = std::strtoull(text.c_str(), nullptr, radix);
      if (errno == ERANGE) fail("more than 64 bits in");
      token.kind = Token::Kind::integer;
      if (peek() == 'U') ++at_;
    }
  }
  if (continues_word(peek()) && peek() != '.') fail("malformed number");
  token.text = text_.substr(first, at_ - first);
  return token;
}

}  // namespace tw::vgpu::ptx
