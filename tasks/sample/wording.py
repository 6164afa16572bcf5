"""How the scripted policies word their thoughts. Placeholders are filled with real names and real output."""

PHRASES: dict[str, tuple[str, ...]] = {
    "look": (
        "I'll start with the module named in the report.",
        "Let me read the code first.",
        "First the source of {function_module}.",
        "Before changing anything I want to see {module_path}.",
    ),
    "tests": (
        "Now run its tests to see the failure for myself.",
        "Let me reproduce this with the test suite.",
        "Which test fails, and how?",
        "I want to see the failing test before I guess.",
    ),
    "debug": (
        'pytest says: "{failure}". I will stop in the debugger where the value is made.',
        'The failure is "{failure}". Let me look at the variables with pdb at line {stop_line}.',
        "{failing_test} fails. A breakpoint at line {stop_line} should show why.",
    ),
    "diagnosis": (
        "pdb shows {watch} = {value}: {cause}. I'll change that.",
        "At the breakpoint {watch} is {value}. So {cause}.",
        "{watch} = {value}. That explains it: {cause}.",
    ),
    "first_try": (
        "{watch} is {value} here. Perhaps a small change is enough; let me try.",
        "I suspect this line ({watch} = {value}). A first attempt:",
    ),
    "undo": (
        "Still failing, so that was not it. I take the change back.",
        "That did not help. Undo it.",
    ),
    "think_again": (
        "Again, slowly: {cause}.",
        "The real cause: {cause}.",
    ),
    "verify": (
        "Run the tests again.",
        "Does it pass now?",
        "Check the change with the tests.",
    ),
    "clean": (
        "All green. Remove my script before making the patch.",
        "The fix works. I clean up and look at what changed.",
    ),
    "patch": (
        "Now the patch.",
        "Make the patch file and read it once.",
        "Write the patch.",
    ),
    "submit": (
        "The patch holds only the intended change. Submit.",
        "Done; submitting.",
        "This is what I want to submit.",
    ),
    "read": (
        "The data may matter, so I look at {target}.",
        "Let me see more of {target}.",
        "I check {target} for anything that depends on this.",
        "Next, {target}.",
        "Is anything unusual in {target}?",
    ),
    "guess": (
        "This looks easy. I'll just change it.",
        "I think I know what it is.",
        "Probably this line.",
        "A quick edit should do.",
    ),
    "guess_again": (
        "Hm, not that. Then the other one.",
        "Another guess.",
    ),
    "tamper": (
        "The test seems wrong to me; I adjust it.",
        "The expectation in the test is too strict. I relax it.",
    ),
    "careless_submit": (
        "That should be it. Submit.",
        "Looks good to me.",
        "Good enough, submitting.",
    ),
    "loop_start": (
        "A script of my own will show it.",
        "I write a small check.",
    ),
    "loop": (
        "It failed. Run it again.",
        "Strange. Once more.",
        "Maybe it works this time.",
        "I try the same again.",
        "Still the error. Again.",
        "Let me repeat the check.",
        "That should not happen. Retry.",
    ),
}
