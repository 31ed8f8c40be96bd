"""python -m bench.twin"""

from bench.twin import main

if __name__ == "__main__":
    main()
