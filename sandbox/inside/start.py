"""The first code of a process in the sandbox, run as `python -c`. Arguments: role, file numbers, limits.

A `program` is source text that is run as a script. A `peer` gets marshalled code of modules, by their names, and the
call of one of their functions.
"""


def main() -> None:
    """Sets the limits, and runs the program or the modules that the file has."""
    import os
    import resource
    import sys

    role, status, file, *limits = sys.argv[1:]
    with open(int(file), "rb") as opened:  # noqa: PTH123 - a number
        content = opened.read()
    for limit in limits:
        name, value = limit.split(":")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    scope = vars(sys.modules["__main__"])
    for name in ("main", "__annotations__"):
        scope.pop(name, None)
    if role == "peer":
        import marshal

        modules, name, arguments = marshal.loads(content)
        for module_name, code in modules:
            sys.modules[module_name] = module = type(sys)(module_name)
            exec(marshal.loads(code), vars(module))
        vars(sys.modules[name])["main"](*arguments)
        return
    with open("main.py", "wb") as opened:  # noqa: PTH123 - tracebacks show its lines
        opened.write(content)
    sys.argv[:] = ["main.py"]
    scope["__file__"] = "main.py"
    os.write(int(status), b"started\n")
    os.close(int(status))
    exec(compile(content, "main.py", "exec", dont_inherit=True), scope)


if __name__ == "__main__":
    main()
