"""Entry of `python -m train`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["video"]:
        from train.video.program import main

        sys.exit(main(sys.argv[2:]))
    from train.program import main

    sys.exit(main())
