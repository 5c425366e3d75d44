-- One slice of an evaluation has arrived. args: id (of the ticket), version, first (task), tasks, answered (of these),
-- score_sum; ARGV[2]: the group's bytes.
-- Returns 'evaluated', 'duplicate' or 'void'. The bytes are kept until the next evaluation is asked for.
local id, version, slice = args.id, args.version, args.first .. ':' .. args.tasks
local eval = key('eval:' .. version)
if not redis.call('ZSCORE', key('eval_issued:' .. version), slice) then
  if redis.call('SISMEMBER', eval .. ':groups', id) == 1 then return 'duplicate' end
  return 'void'
end
redis.call('HINCRBYFLOAT', eval, 'sum', args.score_sum)  -- the first write, because it is the one that Redis may refuse
end_slice(version, slice)
redis.call('SADD', eval .. ':groups', id)
redis.call('SET', key('group:' .. id), ARGV[2])
settle_tasks(version, args.answered, args.tasks - args.answered)
return 'evaluated'
