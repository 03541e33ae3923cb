// llama.cpp's own engine of templates (common/jinja): a conversation as JSON a line in, the prompt as a JSON string out.
#include "chat.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "json.h"

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

using json = common_json;

static std::string text_of(const char * path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

static std::string by_engine(const std::string & source, const json & asked) {
    jinja::lexer lexer;
    auto program = jinja::parse_from_tokens(lexer.tokenize(source));
    jinja::context context(source);
    json given = asked;
    if (asked.contains("chat_template_kwargs")) {
        for (const auto & [key, value] : asked.at("chat_template_kwargs").items()) {
            given[key] = value;
        }
    }
    jinja::global_from_json(context, given, false);
    jinja::runtime runtime(context);
    return jinja::runtime::gather_string_parts(runtime.execute(program))->as_string().str();
}

#ifdef AS_SERVER
// As llama-server's /apply-template: the messages are made what the template seems to want, then rendered.
static std::string as_server(const std::string & source, const json & asked) {
    auto templates = common_chat_templates_init(nullptr, source, asked.value("bos_token", std::string()),
                                                asked.value("eos_token", std::string()));
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(asked.at("messages"));
    if (asked.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(asked.at("tools"));
    }
    inputs.add_generation_prompt = asked.at("add_generation_prompt").get<bool>();
    if (asked.contains("chat_template_kwargs")) {
        for (const auto & [key, value] : asked.at("chat_template_kwargs").items()) {
            inputs.chat_template_kwargs[key] = value.dump();
        }
    }
    return common_chat_templates_apply(templates.get(), inputs).prompt;
}
#endif

int main(int, char ** words) {
    const std::string source = text_of(words[1]);
    for (std::string line; std::getline(std::cin, line);) {
        json answer;
        try {
            const json asked = json::parse(line);
#ifdef AS_SERVER
            answer = as_server(source, asked);
#else
            answer = by_engine(source, asked);
#endif
        } catch (const std::exception & error) {
            answer = json{{"error", std::string(error.what())}};
        }
        std::cout << answer.dump() << std::endl;
    }
}
