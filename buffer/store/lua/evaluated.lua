-- Records the answers to one slice of an evaluation. args: id (of the ticket), version, first (task), tasks, failures
-- ({reason = tasks without an answer}), answered (the others), tallies ({estimate = {sum, sum of squares}}); ARGV[2]: the
-- group's bytes, kept until the next evaluation is requested. origin, tokens (of the answers), lost ({reason = tokens}): for
-- the account, see ledger.py.
-- Returns 'evaluated', 'duplicate' or 'void'.
local id, version, slice = args.id, args.version, args.first .. ':' .. args.tasks
local eval = key('eval:' .. version)
if not redis.call('ZSCORE', key('eval_issued:' .. version), slice) then
  local late = redis.call('SISMEMBER', eval .. ':groups', id) == 1 and 'duplicate' or 'void'
  return settle_late(late, id, args.origin)
end
for name, tally in pairs(args.tallies) do  -- first, because Redis may refuse these writes
  redis.call('HINCRBYFLOAT', eval, 'sum:' .. name, tally[1])
  redis.call('HINCRBYFLOAT', eval, 'squares:' .. name, tally[2])
end
end_slice(version, slice)
redis.call('SADD', eval .. ':groups', id)
redis.call('SET', key('group:' .. id), ARGV[2])
count_eval_tasks(version, args.answered, args.failures)
add_tokens(settle(id, args.origin, args.lost, args.tokens), 'evaluated', args.tokens)
return 'evaluated'
