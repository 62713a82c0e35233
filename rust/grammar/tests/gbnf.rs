//! GBNF: what is accepted, how it becomes terminals, and where it is wrong.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use octavo_grammar::{Kind, gbnf_to_lark};
use support::{accepts, vocabulary};

const JSON: &str = r#"
# What llama.cpp calls json.gbnf, in other words.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::=
  "[" ws (
      value ("," ws value)*
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn gbnf_accepts_what_it_says() {
    let vocabulary = vocabulary();
    let yes = |grammar: &str, text: &str| accepts(&vocabulary, Kind::Grammar, grammar, text);
    for text in
        ["{}", r#"{"a": [1, -2.5e+3, {"b\u00e9": null}], "ü\"": true}"#, "{\"a\":\n   \"x y\"}"]
    {
        assert!(yes(JSON, text), "{text}");
    }
    for text in ["", "[1]", r#"{"a" 1}"#, r#"{"a": 01x}"#, r#"{"a": "\q"}"#, "{\"a\": \"\n\"}"] {
        assert!(!yes(JSON, text), "{text}");
    }
    let moves = r#"root ::= ("1. " move " " move "\n")+
move ::= (pawn | "O-O" "-O"?) [+#]?
pawn ::= ([a-h] "x")? [a-h] [1-8]"#;
    assert!(yes(moves, "1. e4 e5\n1. O-O-O+ exd5#\n"));
    assert!(!yes(moves, "1. e9 e5\n"));
    let escapes =
        "root ::= \"\\x41\\u00e9\\U0001F600\\t\\\"\\\\\" [\\]\\-^a] . [^a-y\\n]{2}\n\n# end";
    assert!(yes(escapes, "Aé😀\t\"\\-\nzé"));
    assert!(yes("a.b_c ::= \"x\"\nroot ::= a.b_c{,2} # comment\n  | \"y\"", "xx"));
    let recursive = "root ::= \"(\" root \")\" root | \"\"";
    assert!(yes(recursive, "(()())()"));
    assert!(!yes(recursive, "(()"));
    assert!(yes(
        "root ::= root \"+\" term | term\nterm ::= [0-9]+ | \"(\" root \")\"",
        "1+(23+4)+5"
    ));
}

/// Terminals of one character would make masks slow, and their number meet a limit in large vocabularies.
#[test]
fn gbnf_keeps_runs_of_characters_in_one_terminal() {
    let vocabulary = vocabulary();
    let nested = "root ::= \"{\" (text | root)* \"}\"\ntext ::= [^{}]+";
    assert!(gbnf_to_lark(nested).unwrap().contains("T1: (/[\\x{0}-z"));
    assert!(accepts(&vocabulary, Kind::Grammar, nested, "{some {text} and {{more} }}"));
    assert!(!accepts(&vocabulary, Kind::Grammar, nested, "{some {text}"));
    // Here a run may have to end for another to begin.
    let two = "root ::= \"(\" word tail \")\"\ntail ::= word root?\nword ::= [a-z]+";
    assert!(!gbnf_to_lark(two).unwrap().contains('T'));
    assert!(accepts(&vocabulary, Kind::Grammar, two, "(ab)"));
    assert!(accepts(&vocabulary, Kind::Grammar, two, "(abc(def))"));
    assert!(!accepts(&vocabulary, Kind::Grammar, two, "(a)"));
    assert!(gbnf_to_lark(JSON).unwrap().matches("\nT").count() >= 3);
}

#[test]
fn gbnf_tells_where_it_is_wrong() {
    for (grammar, message) in [
        ("root ::= \"a\" other", "line 1, column 14: there is no rule other"),
        ("other ::= \"a\"", "no rule root"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: the rule root is defined twice"),
        ("root ::= \"a", "the text ends before \""),
        ("root ::= [a", "the text ends before ]"),
        ("root ::= []", "column 10: no character"),
        ("root ::= [b-a]", "the range's end"),
        ("root ::= (\"a\"\n", "line 2, column 1: a closing parenthesis"),
        ("root ::= \"a\")", "column 13: a rule's name"),
        ("root ::= \"a\"{3,2}", "second number is smaller"),
        ("root ::= \"a\"{x}", "a number is expected"),
        ("root ::= \"a\"{1000000}", "100000 at most"),
        ("root ::= \"\\xZZ\"", "\\x needs 2 hexadecimal digits"),
        ("root ::= \"\\uD800\"", "names no character"),
        ("root ::= \"\\q\"", "the escape \\q is unknown"),
        ("root ::= <[3]>", "use Lark"),
        ("root ::= (=\"a\") \"a\"", "look-ahead"),
        ("root ::= $", "'$' is not expected"),
        ("root := \"a\"", "a rule's name and ::= are expected"),
    ] {
        let error = gbnf_to_lark(grammar).unwrap_err().to_string();
        assert!(error.contains(message), "{grammar}: {error}");
    }
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(gbnf_to_lark(&deep).unwrap_err().to_string().contains("64 levels"));
}
